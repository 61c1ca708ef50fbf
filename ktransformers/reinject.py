"""Another backend for experts that run on one already: out with the old operator, floats back, in with the new one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from ktransformers.checkpoints import FloatsOf, FloatSource
from ktransformers.errors import Problem, RuleMatchError
from ktransformers.injection import Plan, Planned, Report, apply_plan, make_plan, walk
from ktransformers.injection.fit import misfits
from ktransformers.injection.freeing import free_weights
from ktransformers.injection.resolve import operator_class
from ktransformers.injection.slot import Slot
from ktransformers.operators.base import BaseInjectedModule
from ktransformers.rules import Rule, RuleSet

__all__ = ["injected_matches", "reinject"]


def injected_matches(rule: Rule, model: nn.Module) -> list[str]:
    """Names of modules that the rule matches and that are operators of ours already."""
    return [name for name, module in walk(model) if isinstance(module, BaseInjectedModule) and rule.matches_name(name)]


def reinject(rule: Rule, model: nn.Module, *, keep_float: bool, floats: FloatsOf) -> Report:
    """Applies one rule to modules of which some are injected, layer by layer, so that one layer's floats are in memory.

    All or nothing: after a failure every layer runs what it ran before. Modules the rule does not match are not
        touched.
    """
    names = [name for name, _ in walk(model) if rule.matches_name(name)]
    source = floats(names)
    swaps = [_Swap(name, model, source) for name in names]
    _check(rule, model, swaps)
    reports = []
    try:
        for swap in swaps:
            swap.take_out()
            reports.append(apply_plan(make_plan([_only(rule, swap.name)], model), model, keep_float=keep_float))
    except BaseException:
        for swap in reversed(swaps):
            swap.put_back()
        raise
    return _merged(rule, reports, swaps)


@dataclass
class _Swap:
    """One layer on its way from an operator (or none) to another."""

    name: str
    model: nn.Module
    floats: FloatSource
    started: bool = False

    def __post_init__(self) -> None:
        module = self.model.get_submodule(self.name)
        self.old = module if isinstance(module, BaseInjectedModule) else None
        self.original = self.old.orig_module if self.old is not None else module
        self.had_floats = self.old is None or self.old.has_float_weights

    def take_out(self) -> None:
        """Leaves the original, with its floats, in the tree."""
        self.started = True
        if self.old is not None:
            if not self.had_floats:
                self.floats(self.name, self.original)
            self._slot(self.old, filled=True).restore()

    def put_back(self) -> None:
        """The state before `take_out`, from wherever the layer is now."""
        if not self.started:
            return
        current = self.model.get_submodule(self.name)
        if current is self.old:
            return
        if isinstance(current, BaseInjectedModule):
            lost = not current.has_float_weights
            self._slot(current, filled=True).restore()
        else:
            # The original itself, or what a failed injection left in its place when it had freed the floats already.
            lost = current is not self.original
            for parent, attribute in _places(self.model, current):
                setattr(parent, attribute, self.original)
        if self.old is not None:
            self._slot(self.old, filled=False).fill()
            if not self.had_floats:
                free_weights(self.original)
        elif lost:
            self.floats(self.name, self.original)

    def _slot(self, operator: nn.Module, *, filled: bool) -> Slot:
        """Where `operator` is (`filled`), or is to go: every place that it or the original hangs at."""
        places = _places(self.model, operator if filled else self.original)
        planned = Planned(self.name, type(self.original).__name__, _only(Rule(name="."), self.name), type(operator))
        return Slot(planned, self.original, places, [self.name], operator, hooks_moved=filled)


def _places(model: nn.Module, module: nn.Module) -> list[tuple[nn.Module, str]]:
    parents = model.modules()
    return [(parent, name) for parent in parents for name, child in parent._modules.items() if child is module]


def _only(rule: Rule, name: str) -> Rule:
    return replace(rule, name=f"^{re.escape(name)}$")


def _check(rule: Rule, model: nn.Module, swaps: Sequence[_Swap]) -> None:
    """Everything that can be refused is, before anything moves."""
    operator = operator_class(rule.replacement)
    problems: list[Problem] = misfits(model, [(swap.name, swap.original, rule, operator) for swap in swaps])
    if problems:
        raise RuleMatchError(problems)


def _merged(rule: Rule, reports: Sequence[Report], swaps: Sequence[_Swap]) -> Report:
    """One report on all layers, as if one injection had done them, whose undo brings the old operators back."""
    decisions = tuple(replace(decision, rule=rule) for report in reports for decision in report.plan.decisions)
    unmatched = reports[-1].plan.unmatched_experts
    plan = Plan(RuleSet((rule,), rule.origin), decisions, unmatched, ())
    replacements = [replace(done, rule=rule) for report in reports for done in report.replacements]
    # Where undo is not to be had, the old packed weights need not stay in memory for it.
    undoable = all(report.floats_kept for report in reports)
    put_back = [swap.put_back for swap in reversed(swaps)] if undoable else []
    return Report(plan, replacements, [slot for report in reports for slot in report._slots], put_back)
