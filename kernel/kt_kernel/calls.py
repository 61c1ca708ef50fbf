"""One call of the kernel: its arrays checked, its output made, its wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kt_kernel import _ext
from kt_kernel.arrays import FLOATS, INTEGERS, Array, empty_like, mention_gradient, view
from kt_kernel.config import MoEConfig
from kt_kernel.errors import InputError, translated

__all__ = ["Call", "Pending", "prepare"]


@dataclass(frozen=True)
class Call:
    """A checked call: the kernel's arguments, and the owners of the memory they point to."""

    tokens: int
    slots: int
    x: Array
    ids: Array
    weights: Array
    out: Any
    out_array: Array

    def arguments(self) -> tuple[int, int, int, str, int, str, int, str, int, str]:
        return (
            self.tokens,
            self.slots,
            self.x.address,
            self.x.dtype,
            self.ids.address,
            self.ids.dtype,
            self.weights.address,
            self.weights.dtype,
            self.out_array.address,
            self.out_array.dtype,
        )


def prepare(config: MoEConfig, x: Any, expert_ids: Any, weights: Any, *, strict_ids: bool) -> Call:
    """Checks shapes, dtypes and, if `strict_ids`, the ids. Raises `InputError` that says what was expected."""
    mention_gradient(x, "x")
    x_array = view(x, "x", FLOATS, contiguous=True)
    ids = view(expert_ids, "expert_ids", INTEGERS, contiguous=True)
    routing = view(weights, "weights", FLOATS, contiguous=True)
    hidden, slots = config.hidden_size, config.num_experts_per_tok
    if len(x_array.shape) != 2 or x_array.shape[1] != hidden:
        raise InputError(f"x has shape {x_array.shape}; expected (tokens, {hidden}), hidden_size being {hidden}")
    tokens = x_array.shape[0]
    for name, array in (("expert_ids", ids), ("weights", routing)):
        if array.shape != (tokens, slots):
            expected = f"{(tokens, slots)}: the tokens of x by num_experts_per_tok"
            raise InputError(f"{name} has shape {array.shape}; expected {expected}")
    if strict_ids:
        _refuse_strange_ids(ids, config.expert_num)
    out = empty_like(x, (tokens, hidden))
    return Call(tokens, slots, x_array, ids, routing, out, view(out, "out", FLOATS))


def _refuse_strange_ids(ids: Array, experts: int) -> None:
    numbers = np.asarray(ids.owner)
    strange = np.argwhere((numbers < 0) | (numbers >= experts))
    if len(strange):
        token, slot = strange[0]
        number = int(numbers[token, slot])
        bound = f"≥ {experts}" if number >= experts else "< 0"
        more = f" ({len(strange)} such ids)" if len(strange) > 1 else ""
        raise InputError(f"expert id {number} {bound} at token {token}, slot {slot}{more}")


class Pending:
    """A forward under way. It holds every array the kernel reads or writes."""

    def __init__(self, pending: _ext.Pending, call: Call) -> None:
        self._pending = pending
        self._call = call

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._pending.done()

    def result(self) -> Any:
        """Waits, without the GIL, and returns the output; raises what the forward raised."""
        with translated():
            self._pending.wait()
        return self._call.out
