"""What an injection did, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from torch import nn

from ktransformers.errors import UndoError
from ktransformers.injection.lines import LayerEntry, layer_lines
from ktransformers.injection.plan import Plan
from ktransformers.injection.slot import Slot
from ktransformers.injection.tree import collapse, without_numbers
from ktransformers.rules import Rule

__all__ = ["Replacement", "Report"]


@dataclass(frozen=True)
class Replacement:
    """One module that was replaced. `details` is what the operator says of itself: op, backend, format, tier, …"""

    name: str
    old_class: str
    new_class: str
    rule: Rule
    details: Mapping[str, str]
    floats_kept: bool

    @property
    def summary(self) -> str:
        """What runs, in one line that is equal at equal layers."""
        told = {key: value for key, value in self.details.items() if key != "bytes"}
        return told.get("runs") or ", ".join(f"{key} {value}" for key, value in told.items())


class Report:
    """What was replaced by what. `str()` is a text, `table()` a Rich table, `as_dict()` plain data.

    Attributes:
        replacements: in the order of the module tree.
        unmatched_experts: experts modules that no rule decided on.
        warnings: rules that decided nothing, when the plan allowed them.
    """

    def __init__(
        self,
        plan: Plan,
        replacements: Sequence[Replacement],
        slots: Sequence[Slot],
        put_back: Sequence[Callable[[], None]] = (),
    ) -> None:
        """`put_back`: what `undo` does once the originals are back, for what stood there in their place before."""
        self.plan = plan
        self.replacements = tuple(replacements)
        self.unmatched_experts = plan.unmatched_experts
        self.warnings = plan.warnings
        self._slots = tuple(slots)
        self._put_back = tuple(put_back)
        self._undone = False

    @classmethod
    def of(cls, plan: Plan, slots: Sequence[Slot]) -> Report:
        """The report on slots that have just been filled."""
        replacements = [_replacement(decision.name, slot) for decision, slot in _by_place(plan, slots)]
        return cls(plan, replacements, slots)

    @property
    def floats_kept(self) -> bool:
        """Whether every original still has its weights, which is what `undo` needs."""
        return not any(slot.freed for slot in self._slots)

    def counts(self) -> dict[int, int]:
        """Modules decided on by each rule, kept ones included, by the rule's number."""
        return {rule.number: len(self.plan.of(rule)) for rule in self.plan.rules}

    def undo(self) -> None:
        """Puts back what was there before: the same modules with the same parameters, or the operators of an earlier
        injection.

        Raises:
            UndoError: undone already, the float weights were freed, or a module was replaced by somebody else since.
                The model is then as it was before the call.
        """
        if self._undone:
            raise UndoError("this injection was undone already")
        if not self.floats_kept:
            names = "; ".join(collapse(slot.name for slot in self._slots if slot.freed))
            raise UndoError(
                f"the float weights of {names} were freed when they were packed; inject with keep_float=True to be "
                "able to go back, or load the model again"
            )
        changed = [slot.name for slot in self._slots if not slot.filled]
        if changed:
            raise UndoError(f"{'; '.join(collapse(changed))} is not what this injection put there; nothing was undone")
        for slot in self._slots:
            assert slot.operator is not None
            slot.original.train(slot.operator.training)
            slot.restore()
        for put_back in self._put_back:
            put_back()
        self._put_back = ()
        self._undone = True

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "rules": self.plan.rules.origin,
            "replacements": [
                {
                    "name": r.name,
                    "old_class": r.old_class,
                    "new_class": r.new_class,
                    "rule": r.rule.number,
                    "details": dict(r.details),
                }
                for r in self.replacements
            ],
            "counts": self.counts(),
            "unmatched_experts": list(self.unmatched_experts),
            "warnings": list(self.warnings),
            "floats_kept": self.floats_kept,
        }

    def table(self) -> Table:
        """One row for all modules that differ in their layer's number only."""
        table = Table("module", "was", "is", "runs as", "rule")
        for names, first in self._groups():
            place = f"{first.rule.number} ({first.rule.origin})"
            table.add_row(names, first.old_class, first.new_class, first.summary, place)
        return table

    def lines(self, *, verbose: bool = False) -> list[str]:
        """What runs where, for a program to say when it starts: rule, backend asked for and what runs, a line for each
        range of layers, or for each module.
        """
        entries = (LayerEntry(r.name, r.rule, r.details) for r in self.replacements)
        return layer_lines(entries, self.plan, verbose=verbose)

    def __str__(self) -> str:
        count = len(self.replacements)
        lines = [f"{count} module{'' if count == 1 else 's'} replaced by the rules of {self.plan.rules.origin}"]
        for names, first in self._groups():
            lines.append(
                f"  rule {first.rule.number}: {names}: {first.old_class} → {first.new_class} ({first.summary})"
            )
        if self.unmatched_experts:
            lines.append(f"  experts that no rule matches: {'; '.join(collapse(self.unmatched_experts))}")
        return "\n".join([*lines, *(f"  {warning}" for warning in self.warnings)])

    def __repr__(self) -> str:
        return f"<Report: {len(self.replacements)} modules replaced by {self.plan.rules.origin}>"

    def _groups(self) -> list[tuple[str, Replacement]]:
        groups: dict[tuple[int, str, str, str, str], list[Replacement]] = {}
        for r in self.replacements:
            key = (r.rule.number, without_numbers(r.name), r.old_class, r.new_class, r.summary)
            groups.setdefault(key, []).append(r)
        return [("; ".join(collapse(r.name for r in members)), members[0]) for members in groups.values()]


def _by_place(plan: Plan, slots: Sequence[Slot]) -> list[tuple[Any, Slot]]:
    """Each planned replacement with its slot; a module that hangs at two places has one slot for both."""
    slot_of = {name: slot for slot in slots for name in slot.names}
    return [(planned, slot_of[planned.name]) for planned in plan.replacements]


def _replacement(name: str, slot: Slot) -> Replacement:
    operator = slot.operator
    assert operator is not None
    return Replacement(
        name,
        type(slot.original).__name__,
        type(operator).__name__,
        slot.planned.rule,
        _describe(operator),
        not slot.freed,
    )


def _describe(operator: nn.Module) -> dict[str, str]:
    describe = getattr(operator, "describe", None)
    return dict(describe()) if callable(describe) else {"op": type(operator).__name__}
