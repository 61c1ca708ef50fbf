"""Small integers packed into larger ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["AWQ_ORDER", "nibbles", "unpack"]

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word AWQ puts the 1st, 2nd, … of 8 neighbours: its packing takes 0 2 4 6 1 3 5 7 from low to high bits."""


def unpack(words: NDArray[Any], bits: int, axis: int, order: tuple[int, ...] | None = None) -> NDArray[np.uint8]:
    """int32 words to the 32 / bits codes that each holds from low to high bits, neighbours along `axis`."""
    count = 32 // bits
    places = np.arange(count) if order is None else np.array(order)
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    moved = np.moveaxis(unsigned, axis, -1)
    codes = (moved[..., None] >> (places * bits).astype(np.uint32)) & np.uint32((1 << bits) - 1)
    codes = codes.astype(np.uint8).reshape(*moved.shape[:-1], moved.shape[-1] * count)
    return np.moveaxis(codes, -1, axis)


def nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(…, n) bytes to (…, 2n) codes, the low half of each byte first."""
    both = np.stack([codes & 0xF, codes >> 4], axis=-1)
    return both.reshape(*codes.shape[:-1], 2 * codes.shape[-1])
