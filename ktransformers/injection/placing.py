"""Operators put into a model before it has weights, and loaded from a source one after another.

This is how a model loads with its experts never in memory as floats: the operators stand where the experts stood while
transformers loads everything else. The plan's other operators are applied to the loaded model as to any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import nn

from ktransformers.errors import InjectionError
from ktransformers.experts import ModuleWeights
from ktransformers.injection.apply import construct
from ktransformers.injection.freeing import free_weights
from ktransformers.injection.plan import Plan
from ktransformers.injection.progress import track
from ktransformers.injection.slot import Slot, find_slots

__all__ = ["load_placed", "place_operators"]


def place_operators(plan: Plan, model: nn.Module, *, holds: Callable[[str], bool], tied: Collection[str]) -> list[Slot]:
    """Puts in those operators of a plan that load from a source (`load_from`), into a model on the meta device.

    Args:
        holds: whether the source has all weights of the module of that name, and can read them alone.
        tied: names of parameters that several modules share; their modules are left to transformers.

    Returns what was put in, in the order of the tree. Raises `InjectionError` for an operator that cannot be built.
    """
    slots = find_slots(plan, model)
    alone = [slot for slot in slots if _stands_alone(slot, slots, tied)]
    placed = [slot for slot in alone if hasattr(slot.planned.operator, "load_from") and holds(slot.name)]
    for slot in placed:
        slot.operator = construct(slot, model)
    for slot in placed:
        slot.fill()
        _show_tensors(slot)
    return placed


def load_placed(
    slots: Sequence[Slot],
    weights: Iterable[ModuleWeights],
    *,
    keep_float: bool,
    loaded: Callable[[Slot], None] = lambda _: None,
    progress: bool = True,
) -> None:
    """Loads operators that stand in the model, each from its entry of `weights`; `loaded` is told of each.

    With `keep_float` the originals get their float weights too, else only those that operators compute with.
    Raises `InjectionError`; the model is then of no use.
    """
    with track("Packing", len(slots), shown=progress) as done, torch.no_grad():
        for slot, source in zip(slots, weights, strict=True):
            hide_tensors(slot)
            try:
                _load(slot, source, keep_float)
            except Exception as error:
                where = slot.planned.rule.where
                raise InjectionError(
                    f"{where}: loading {type(slot.operator).__name__} for {slot.name} failed: {error}. The model was "
                    "not loaded"
                ) from error
            loaded(slot)
            done(slot.name)


def _load(slot: Slot, weights: ModuleWeights, keep_float: bool) -> None:
    operator: nn.Module | None = slot.operator
    assert operator is not None
    if keep_float:
        weights.fill(slot.original)
        operator.load()  # type: ignore[operator]
        return
    operator.load_from(weights)  # type: ignore[operator]
    if not getattr(operator, "needs_original", True):
        free_weights(slot.original)
        slot.freed = True


def _show_tensors(slot: Slot) -> None:
    """Lets the original's tensors be seen on the operator, as what needs no initial values: some models' blocks
    initialise their experts by name, whether or not there is anything to do.
    """
    assert slot.operator is not None
    for name, parameter in slot.original._parameters.items():
        if parameter is not None and not hasattr(slot.operator, name):
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
            slot.operator.__dict__[name] = parameter  # around nn.Module: in no state dict


def hide_tensors(slot: Slot) -> None:
    """Ends what `place_operators` did so that an operator's tensors could be looked at."""
    assert slot.operator is not None
    for name, parameter in slot.original._parameters.items():
        if parameter is not None and slot.operator.__dict__.get(name) is parameter:
            del slot.operator.__dict__[name]


def _stands_alone(slot: Slot, slots: Sequence[Slot], tied: Collection[str]) -> bool:
    """Neither inside nor around another one, at one place only, and with no parameter of another module's."""
    around = [other for other in slots if other is not slot]
    nested = any(_inside(slot.name, other.name) or _inside(other.name, slot.name) for other in around)
    return not nested and len(slot.names) == 1 and not any(_inside(name, slot.name) for name in tied)


def _inside(name: str, outer: str) -> bool:
    return name.startswith(f"{outer}.")
