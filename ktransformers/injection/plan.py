"""Rules × module tree → `Plan`: which module becomes what, by which rule. Nothing is built and no weight is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ktransformers.errors import Problem, RuleMatchError, UnknownOperatorError
from ktransformers.injection.diagnose import explain_unused
from ktransformers.injection.fit import Candidate, misfits, untouchable
from ktransformers.injection.legacy import modernised, with_way_out
from ktransformers.injection.match import match_rules
from ktransformers.injection.resolve import operator_class
from ktransformers.injection.tree import collapse, experts_modules, walk
from ktransformers.rules import Rule, RuleSet, RulesLike, load_rules

__all__ = ["Plan", "Planned", "make_plan"]


@dataclass(frozen=True)
class Planned:
    """What one module becomes: an instance of `operator`, or (None) what it is."""

    name: str
    class_name: str
    rule: Rule
    operator: type[nn.Module] | None

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The rule's arguments, recorded for kept modules too."""
        return self.rule.kwargs


@dataclass(frozen=True)
class Plan:
    """What rules do to a model.

    Attributes:
        rules: the rules, in order.
        decisions: every module that a rule decided on, kept ones included, parents before children.
        unmatched_experts: experts modules that no rule decided on; they stay with transformers.
        warnings: what would have been an error without `allow_dead`.
    """

    rules: RuleSet
    decisions: tuple[Planned, ...]
    unmatched_experts: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def replacements(self) -> tuple[Planned, ...]:
        """The decisions that replace a module."""
        return tuple(decision for decision in self.decisions if decision.operator is not None)

    def without(self, names: Collection[str]) -> Plan:
        """The plan for all modules but these."""
        return replace(self, decisions=tuple(decision for decision in self.decisions if decision.name not in names))

    def of(self, rule: Rule) -> tuple[Planned, ...]:
        """The decisions that one of the rules took."""
        return tuple(decision for decision in self.decisions if decision.rule is rule)

    def __str__(self) -> str:
        lines = []
        for rule in self.rules:
            decided = self.of(rule)
            becomes = "kept" if rule.keeps else f"→ {rule.replacement.rpartition('.')[2]}"
            names = "; ".join(collapse(d.name for d in decided)) or "nothing"
            lines.append(f"{rule.where}: {names} {becomes}")
        if self.unmatched_experts:
            lines.append(f"experts that no rule matches: {'; '.join(collapse(self.unmatched_experts))}")
        return "\n".join([*lines, *self.warnings])


def make_plan(rules: RulesLike, model: nn.Module, *, allow_dead: bool = False) -> Plan:
    """Matches rules against a model, live or on the meta device, and checks everything that can be checked before.

    Args:
        rules: anything `load_rules` takes.
        model: the root itself is never replaced.
        allow_dead: rules that decide nothing are warnings instead of errors.

    Raises:
        RuleFileError: the rules are malformed.
        RuleMatchError: listing every rule that matches nothing or is shadowed, every class, op, backend, device and
            argument that is refused, each with file, line and rule number.
    """
    written = load_rules(rules)
    rules = modernised(written)
    modules = list(walk(model))
    matching, problems = match_rules(rules, modules)
    operators, unknown = _operators(rules)
    candidates: list[Candidate] = [
        (name, module, rule, operators[id(rule)]) for name, module, rule in matching.decided if id(rule) in operators
    ]
    unused = explain_unused(model, modules, rules, matching)
    problems += [*unknown, *untouchable(modules, candidates), *misfits(model, candidates)]
    if not allow_dead:
        problems += unused if rules is written else with_way_out(unused)
    if problems:
        raise RuleMatchError(sorted(problems, key=lambda problem: problem.rule or 0))
    decisions = tuple(
        Planned(name, type(module).__name__, rule, operators.get(id(rule))) for name, module, rule in matching.decided
    )
    known = {decision.name for decision in decisions} | matching.sheltered
    unmatched = tuple(name for name in experts_modules(modules) if name not in known)
    return Plan(rules, decisions, unmatched, tuple(str(problem) for problem in unused))


def _operators(rules: RuleSet) -> tuple[dict[int, type[nn.Module]], list[Problem]]:
    """The class of each rule that replaces, by the rule's identity."""
    classes: dict[int, type[nn.Module]] = {}
    problems: list[Problem] = []
    for rule in rules:
        if rule.keeps:
            continue
        try:
            classes[id(rule)] = operator_class(rule.replacement)
        except UnknownOperatorError as error:
            problems.append(rule.problem(f"`replace.class`: {error}"))
    return classes, problems
