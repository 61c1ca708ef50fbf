"""Quantised blocks of GGUF files, decoded by all threads: to floats, or to their own whole numbers and scales."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kt_kernel import _ext
from kt_kernel.contexts import resolve_threads, shared_context
from kt_kernel.errors import InputError
from kt_kernel.quantized import GroupedMatrix, Levels

__all__ = ["BLOCK_TYPES", "dequantize", "unpack"]

BLOCK_TYPES: dict[str, _ext.BlockType] = {block.name: block for block in _ext.block_types()}
"""The block types that are decoded here, by ggml's name."""


def dequantize(
    block_type: str, blocks: NDArray[np.uint8], *, bfloat16: bool = False, threads: int | None = None
) -> NDArray[np.float32] | NDArray[np.uint16]:
    """The weights of whole rows of blocks.

    Args:
        blocks: uint8 (…, bytes of a row), contiguous; read-only memory, such as a mapped file, is fine.
        bfloat16: round to bf16, nearest even, and give the bit patterns.

    Returns float32 or uint16 of shape (…, inputs): what the `gguf` package's `dequantize` gives, bit for bit.
    Raises `InputError` for an unknown type or bytes that are no whole blocks.
    """
    kind = _checked(block_type, blocks)
    shape = (*blocks.shape[:-1], blocks.shape[-1] // kind.bytes * kind.weights)
    weights: NDArray[Any] = np.empty(shape, dtype=np.uint16 if bfloat16 else np.float32)
    _ext.dequantize_blocks(
        shared_context(resolve_threads(threads)),
        kind.name,
        blocks.ctypes.data,
        blocks.nbytes,
        weights.ctypes.data,
        "bfloat16" if bfloat16 else "float32",
    )
    return weights


def unpack(block_type: str, blocks: NDArray[np.uint8], *, threads: int | None = None) -> GroupedMatrix:
    """The parts of a matrix's blocks, without rounding: `unpack(…).dequantize()` equals `dequantize(…)`.

    blocks: uint8 (N, bytes of a row), contiguous. Raises `InputError` as `dequantize` does.
    """
    kind = _checked(block_type, blocks)
    if blocks.ndim != 2:
        raise InputError(f"the blocks of one matrix have shape (channels, bytes of a row), got {blocks.shape}")
    channels, inputs = blocks.shape[0], blocks.shape[1] // kind.bytes * kind.weights
    values = np.empty((channels, inputs), dtype=np.int8)
    scales = np.empty((channels, inputs // kind.group), dtype=np.float32)
    minimums = np.empty_like(scales) if kind.has_minimum else None
    _ext.unpack_blocks(
        shared_context(resolve_threads(threads)),
        kind.name,
        blocks.ctypes.data,
        blocks.nbytes,
        values.ctypes.data,
        scales.ctypes.data,
        0 if minimums is None else minimums.ctypes.data,
    )
    levels: Levels = kind.levels  # type: ignore[assignment]  # a string of the C++ table; a test holds it to LEVELS
    return GroupedMatrix(values, scales, kind.group, levels, minimums)


def _checked(block_type: str, blocks: NDArray[np.uint8]) -> _ext.BlockType:
    kind = BLOCK_TYPES.get(block_type)
    if kind is None:
        raise InputError(f"GGUF blocks of type {block_type} are not decoded here; types: {', '.join(BLOCK_TYPES)}")
    if blocks.dtype != np.uint8 or not blocks.flags.c_contiguous or blocks.ndim == 0:
        raise InputError(f"GGUF blocks come as contiguous uint8, got {blocks.dtype} of shape {blocks.shape}")
    if blocks.shape[-1] % kind.bytes:
        raise InputError(f"rows of {blocks.shape[-1]} bytes are no whole {kind.name} blocks of {kind.bytes} bytes")
    return kind
