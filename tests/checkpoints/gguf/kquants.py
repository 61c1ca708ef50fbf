"""Quantisers for blocks that the `gguf` package decodes and does not write. Plain rounding, far from the best choice of
scales, but valid blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def q4_k(numbers: NDArray[np.float32]) -> Bytes:
    scales, codes = _with_minimums(numbers, levels=15)
    pairs = codes.reshape(len(codes), 4, 2, 32)
    packed = (pairs[:, :, 0] | pairs[:, :, 1] << 4).astype(np.uint8)
    return _rows(numbers, scales, packed.reshape(len(codes), 128))


def q5_k(numbers: NDArray[np.float32]) -> Bytes:
    scales, codes = _with_minimums(numbers, levels=31)
    pairs = (codes & 15).reshape(len(codes), 4, 2, 32)
    packed = (pairs[:, :, 0] | pairs[:, :, 1] << 4).astype(np.uint8)
    high = np.zeros((len(codes), 32), dtype=np.uint8)
    for group in range(8):
        high |= (codes.reshape(len(codes), 8, 32)[:, group] >> 4) << group
    return _rows(numbers, scales, high, packed.reshape(len(codes), 128))


def q6_k(numbers: NDArray[np.float32]) -> Bytes:
    groups = numbers.reshape(-1, 16, 16)
    wanted = np.abs(groups).max(axis=2) / 31
    unit = _half(wanted.max(axis=1, keepdims=True) / 127)
    scales = np.rint(wanted / np.where(unit == 0, 1, unit)).clip(-128, 127).astype(np.int8)
    steps = (unit * scales)[:, :, None]
    signed = np.rint(groups / np.where(steps == 0, 1, steps)).clip(-32, 31).astype(np.int8)
    codes = (signed + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.stack(
        [codes[:, :, 0] & 15 | (codes[:, :, 2] & 15) << 4, codes[:, :, 1] & 15 | (codes[:, :, 3] & 15) << 4], 2
    )
    high = sum((codes[:, :, place] >> 4) << (2 * place) for place in range(4))
    return _rows(numbers, low.reshape(-1, 128), np.asarray(high, np.uint8).reshape(-1, 64), _bytes(scales), _bits(unit))


QUANTIZERS: dict[str, Any] = {"Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k}


def _with_minimums(numbers: NDArray[np.float32], levels: int) -> tuple[Bytes, Bytes]:
    """The 16 bytes of scales and minimums that Q4_K and Q5_K begin with, and the codes (blocks, 256)."""
    groups = numbers.reshape(-1, 8, 32)
    lowest = np.maximum(-groups.min(axis=2), 0)
    wanted = (groups.max(axis=2) + lowest) / levels
    unit, low_unit = _half(wanted.max(axis=1, keepdims=True) / 63), _half(lowest.max(axis=1, keepdims=True) / 63)
    scale = np.rint(wanted / np.where(unit == 0, 1, unit)).clip(0, 63).astype(np.uint8)
    low = np.rint(lowest / np.where(low_unit == 0, 1, low_unit)).clip(0, 63).astype(np.uint8)
    step, shift = (unit * scale)[:, :, None], (low_unit * low)[:, :, None]
    codes = np.rint((groups + shift) / np.where(step == 0, 1, step)).clip(0, levels).astype(np.uint8)
    first = scale[:, :4] | (scale[:, 4:] >> 4) << 6
    second = low[:, :4] | (low[:, 4:] >> 4) << 6
    third = scale[:, 4:] & 15 | (low[:, 4:] & 15) << 4
    return np.concatenate([_bits(unit), _bits(low_unit), first, second, third], axis=1), codes.reshape(-1, 256)


def _half(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    return numbers.astype(np.float16).astype(np.float32)


def _bits(halves: NDArray[np.float32]) -> Bytes:
    return _bytes(halves.astype(np.float16))


def _bytes(numbers: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(numbers).view(np.uint8)


def _rows(numbers: NDArray[np.float32], *parts: Bytes) -> Bytes:
    """One block after the other along the last dimension."""
    return np.concatenate(parts, axis=1).reshape(*numbers.shape[:-1], -1)
