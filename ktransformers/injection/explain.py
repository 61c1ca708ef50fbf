"""Which rule took a module, and what every other rule had to do with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ktransformers.errors import RuleMatchError, UnknownModuleError, UnknownOperatorError
from ktransformers.injection.diagnose import near_names
from ktransformers.injection.fit import misfits, untouchable
from ktransformers.injection.match import RuleUse, match_rules
from ktransformers.injection.resolve import operator_class
from ktransformers.injection.tree import collapse, walk, without_numbers
from ktransformers.rules import Rule, RulesLike, load_rules

__all__ = ["Explanation", "explain_modules"]


@dataclass(frozen=True)
class Explanation:
    """What the rules make of modules that differ in their layer's number only.

    Attributes:
        names: the modules.
        class_name: their class.
        winner: the rule that takes them; None when none does.
        verdicts: one sentence for each rule, in order: takes it, would have, or why it does not match.
        problems: what the winner's operator refuses.
    """

    names: tuple[str, ...]
    class_name: str
    winner: Rule | None
    verdicts: tuple[tuple[Rule, str], ...]
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{'; '.join(collapse(self.names))} ({self.class_name})"]
        lines += [f"  {rule.where}: {verdict}" for rule, verdict in self.verdicts]
        lines += [f"  refused: {problem}" for problem in self.problems]
        return "\n".join(lines if self.winner else [*lines, "  no rule takes it: it stays as it is"])


def explain_modules(rules: RulesLike, model: nn.Module, wanted: str) -> list[Explanation]:
    """Tells why each module became what it becomes, or stays.

    Args:
        rules: anything `load_rules` takes.
        model: live, or on the meta device.
        wanted: a module's dotted name, or a regular expression that is searched in all of them.

    Raises:
        RuleFileError: the rules are malformed.
        RuleMatchError: a class in `match.class` cannot be imported.
        UnknownModuleError: no module is called so, with the nearest names; or no regular expression.
    """
    rules = load_rules(rules)
    modules = list(walk(model))
    found = _named(wanted, modules)
    matching, problems = match_rules(rules, modules)
    if problems:
        raise RuleMatchError(problems)
    winners = {name: rule for name, _, rule in matching.decided}
    groups: dict[object, list[tuple[str, nn.Module]]] = {}
    told: dict[object, tuple[tuple[Rule, str], ...]] = {}
    for name, module in found:
        verdicts = tuple((use.rule, _verdict(use, name, module)) for use in matching.uses)
        general = tuple(text.replace(name, "{name}") for _, text in verdicts)
        key = (without_numbers(name), type(module).__name__, tuple(map(without_numbers, general)))
        groups.setdefault(key, []).append((name, module))
        told.setdefault(key, verdicts)
    return [_explanation(model, members, winners.get(members[0][0]), told[key]) for key, members in groups.items()]


def _explanation(
    model: nn.Module,
    members: Sequence[tuple[str, nn.Module]],
    winner: Rule | None,
    verdicts: tuple[tuple[Rule, str], ...],
) -> Explanation:
    problems: list[str] = []
    if winner is not None and not winner.keeps:
        try:
            operator = operator_class(winner.replacement)
            candidates = [(name, module, winner, operator) for name, module in members]
            found = [*untouchable(list(walk(model)), candidates), *misfits(model, candidates)]
            problems = [problem.text for problem in found]
        except UnknownOperatorError as error:
            problems = [f"`replace.class`: {error}"]
    names = tuple(name for name, _ in members)
    return Explanation(names, type(members[0][1]).__name__, winner, verdicts, tuple(problems))


def _named(wanted: str, modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    exact = [(name, module) for name, module in modules if name == wanted]
    if exact:
        return exact
    try:
        pattern = re.compile(wanted)
    except re.error as error:
        raise UnknownModuleError(f"no module is called {wanted!r}, and it is no regular expression: {error}") from error
    found = [(name, module) for name, module in modules if pattern.search(name)]
    if not wanted or not found:
        hints = near_names(wanted, modules)
        raise UnknownModuleError(
            f"no module of this model is called {wanted!r} or matches it{f'; {hints}' if hints else ''}"
        )
    return found


def _verdict(use: RuleUse, name: str, module: nn.Module) -> str:
    rule = use.rule
    if name in use.taken:
        return "takes it: " + ("kept as it is" if rule.keeps else f"becomes {rule.replacement.rpartition('.')[2]}")
    if name in use.lost:
        return f"would take it, but rule {use.lost[name].number} was first"
    if name in use.sheltered:
        keeper = use.sheltered[name]
        return f"would take it, but rule {keeper.number} leaves everything around it alone (`recursive: false`)"
    if not rule.matches_name(name):
        return f"does not match: `name` '{rule.name}' is not found in it"
    return f"does not match: it is a {type(module).__name__}, not a {rule.module_class}"
