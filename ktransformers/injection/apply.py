"""`Plan` → injected model: construct every operator, load one after another, swap all of them in, or none."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import nn

from ktransformers.errors import InjectionError, RuleMatchError
from ktransformers.injection.claim import claimed
from ktransformers.injection.fit import Candidate, misfits, untouchable
from ktransformers.injection.freeing import FreedModule, free_weights, meta_tensors
from ktransformers.injection.plan import Plan
from ktransformers.injection.progress import track
from ktransformers.injection.report import Report
from ktransformers.injection.slot import Slot, find_slots
from ktransformers.injection.tree import collapse, config_of, walk
from ktransformers.log import get_logger

__all__ = ["apply_plan", "construct"]

log = get_logger("injection")


def apply_plan(
    plan: Plan,
    model: nn.Module,
    *,
    keep_float: bool = True,
    progress: bool = True,
    gguf_loader: object = None,
    placed: Sequence[Slot] = (),
) -> Report:
    """Carries a plan out on a model with weights, all or nothing.

    Args:
        plan: made on this model, or on its twin on the meta device; it is checked against this one again.
        keep_float: the originals stay in memory. A failure, Ctrl-C included, then leaves the model as it was, and
            `Report.undo` restores it. Without it, each original's weights are freed as soon as its operator is loaded;
            after a failure the modules that were freed refuse to run, and the error says so.
        progress: a bar on stderr while loading, when stderr is a terminal.
        gguf_loader: passed on to the operators.
        placed: what stands in the model already, loaded, by the same plan; it comes into the report.

    Raises:
        RuleMatchError: the model refuses what its twin accepted.
        InjectionError: the plan is for another model, its weights are not in memory, an operator failed, or another
            thread is replacing the same modules.
    """
    rest = plan.without([name for slot in placed for name in slot.names])
    slots = find_slots(rest, model)
    _check(rest, model, slots)
    with claimed(slots):
        _carry_out(slots, model, keep_float=keep_float, progress=progress, gguf_loader=gguf_loader)
        try:
            report = Report.of(plan, [*placed, *slots])
        except BaseException as error:
            _give_up(error, slots)
    for warning in plan.warnings:
        log.warning("%s", warning)
    log.info("%s", report)
    return report


def _carry_out(
    slots: Sequence[Slot], model: nn.Module, *, keep_float: bool, progress: bool, gguf_loader: object
) -> None:
    for slot in slots:
        try:
            slot.operator = construct(slot, model, gguf_loader)
        except InjectionError as error:
            raise InjectionError(f"{error}. The model is as it was") from error.__cause__
    try:
        with track("Packing", len(slots), shown=progress) as done, torch.no_grad():
            for index, slot in enumerate(slots):
                _load(slot)
                if not keep_float:
                    _free(slot, waiting=slots[index + 1 :])
                done(slot.name)
        for slot in slots:
            slot.fill()
    except BaseException as error:  # Ctrl-C too: whatever ends this must not leave half a model
        _give_up(error, slots)


def _give_up(error: BaseException, slots: Sequence[Slot]) -> NoReturn:
    state = _take_back(slots)
    if not isinstance(error, Exception):
        error.add_note(state)
        log.warning("injection interrupted: %s", state)
        raise error
    raise InjectionError(f"{str(error) or type(error).__name__}. {state}") from error


def _check(plan: Plan, model: nn.Module, slots: Sequence[Slot]) -> None:
    """The checks of planning on the live modules, and that their weights are here."""
    original = {name: slot.original for slot in slots for name in slot.names}
    candidates: list[Candidate] = [
        (planned.name, original[planned.name], planned.rule, planned.operator)
        for planned in plan.replacements
        if planned.operator is not None
    ]
    problems = [*untouchable(list(walk(model)), candidates), *misfits(model, candidates)]
    if problems:
        raise RuleMatchError(problems)
    absent = {slot.name: tensors for slot in slots if (tensors := meta_tensors(slot.original))}
    if absent:
        name, tensors = next(iter(absent.items()))
        raise InjectionError(
            f"the weights of {'; '.join(collapse(absent))} are not in memory: {name}.{tensors[0]} is on the meta "
            "device (offloaded by a device_map, or never loaded). Load the model without offloading, or only plan on it"
        )


def construct(slot: Slot, model: nn.Module, gguf_loader: object = None) -> nn.Module:
    """A slot's operator, built around its original. Raises `InjectionError` that names rule and module."""
    operator, rule = slot.planned.operator, slot.planned.rule
    assert operator is not None
    try:
        return operator(
            key=slot.name,
            gguf_loader=gguf_loader,
            config=config_of(model, slot.name),
            orig_module=slot.original,
            **copy.deepcopy(dict(rule.kwargs)),  # one operator's changes must not reach the next
        )
    except Exception as error:
        raise InjectionError(f"{rule.where}: {operator.__name__} for {slot.name} cannot be built: {error}") from error


def _load(slot: Slot) -> None:
    load = getattr(slot.operator, "load", None)
    if not callable(load):  # a third-party class that is ready when constructed
        return
    try:
        load()
    except Exception as error:
        where = slot.planned.rule.where
        raise InjectionError(
            f"{where}: loading {type(slot.operator).__name__} for {slot.name} failed: {error}"
        ) from error


def _free(slot: Slot, waiting: Sequence[Slot]) -> None:
    """Drops the original's weights, unless the operator computes with them or does not say."""
    if getattr(slot.operator, "needs_original", True):
        return
    slot.freed = True  # before the first tensor goes, so that an interruption finds it marked
    free_weights(slot.original, keep=[other.original for other in waiting])


def _take_back(slots: Sequence[Slot]) -> str:
    """Undoes what was done so far and says in which state the model is."""
    freed = [slot for slot in slots if slot.freed]
    reason = "an injection freed its float weights and then failed; load the model again"
    for slot in slots:
        slot.restore(FreedModule(slot.name, reason) if slot.freed else None)
    if not freed:
        return "The model is as it was"
    names = "; ".join(collapse(slot.name for slot in freed))
    return (
        f"The float weights of {names} had been freed already, so these modules cannot run any more: load the model "
        "again. With keep_float=True a failure leaves the model as it was"
    )
