"""The most memory that loading takes, by the order in which it happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ktransformers.checkpoints.parts import PART_BYTES

__all__ = ["Step", "peak_of_loading"]

# Operators that load from a checkpoint get their floats in parts: one is packed while the next is there as on disk and
# once more as transformers stacks it.
_PARTS_AT_ONCE = 3


@dataclass(frozen=True)
class Step:
    """One operator. Bytes: its `floats`, what it will hold (`held`); whether the floats stay (`kept`), and whether it
    reads them part by part while it packs (`streamed`).
    """

    floats: int
    held: int
    kept: bool
    streamed: bool


def peak_of_loading(others: int, steps: Sequence[Step]) -> int:
    """Bytes at the worst moment, from nothing to all operators loaded. `others`: weights that no operator takes."""
    waiting = [step for step in steps if not step.streamed]
    now = peak = others + sum(step.floats for step in waiting)
    for step in [*(step for step in steps if step.streamed), *waiting]:
        if step.streamed:
            peak = max(peak, now + step.held + _PARTS_AT_ONCE * min(step.floats, PART_BYTES))
            now += step.held + (step.floats if step.kept else 0)
        else:
            now += step.held
            peak = max(peak, now)
            now -= 0 if step.kept else step.floats
        peak = max(peak, now)
    return peak
