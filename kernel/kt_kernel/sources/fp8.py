"""FP8 e4m3 checkpoints: DeepSeek-V3's (quant_method "fp8") and FBGEMM's ("fbgemm_fp8").

weight e4m3 (N, K); weight_scale_inv (⌈N/bn⌉, ⌈K/bk⌉) for blocks, or weight_scale: one for all, or one a channel. Both
multiply, whatever the name says. Scales are fp32, bf16, or powers of two as e8m0 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kt_kernel.layer_formats import MatrixFormat
from kt_kernel.quantized import Fp8Matrix
from kt_kernel.sources.base import Parts, Weight, need

__all__ = ["Fp8", "e8m0", "fp8_matrix"]


class Fp8:
    name = "FP8"
    parts = ("weight", "weight_scale_inv", "weight_scale")

    def __init__(self, config: Mapping[str, Any]) -> None:
        block = config.get("weight_block_size")
        self._block = None if block is None else (int(block[0]), int(block[1]))

    @property
    def packed(self) -> MatrixFormat:
        return MatrixFormat("FP8")

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
        codes = shapes.get("weight", ())
        return (codes[0], codes[1]) if len(codes) == 2 and len(shapes) > 1 else None

    def decode(self, parts: Parts) -> Weight:
        inverse = parts.get("weight_scale_inv")
        return fp8_matrix(parts, inverse if inverse is not None else parts["weight_scale"], self._block)


def fp8_matrix(parts: Parts, scales: NDArray[Any], block: tuple[int, int] | None) -> Weight:
    """The matrix with `scales` in whatever of the usual shapes; `block` as the configuration has it."""
    codes = parts["weight"]
    need(codes.dtype == np.uint8 and codes.ndim == 2, parts, f"no matrix of 8-bit floats, but {codes.dtype}")
    channels, inputs = codes.shape
    scales = e8m0(scales) if scales.dtype == np.uint8 else scales.astype(np.float32)
    if scales.size == 1:
        return Fp8Matrix(codes, np.full((channels, 1), scales.item(), np.float32), (1, inputs))
    if scales.size == channels and block is None:
        return Fp8Matrix(codes, np.ascontiguousarray(scales.reshape(channels, 1)), (1, inputs))
    need(block is not None, parts, f"scales of shape {scales.shape}, and no block size in the configuration")
    assert block is not None
    expected = (-(-channels // block[0]), -(-inputs // block[1]))
    need(scales.shape == expected, parts, f"scales of shape {scales.shape}; blocks of {block} make it {expected}")
    return Fp8Matrix(codes, np.ascontiguousarray(scales), block)


def e8m0(bits: NDArray[np.uint8]) -> NDArray[np.float32]:
    """2^(bits − 127), as OCP Microscaling Formats 1.0, 5.4.1 has it; 255 is NaN."""
    values = np.ldexp(np.float32(1), bits.astype(np.int32) - 127)
    return np.where(bits == 255, np.float32(np.nan), values).astype(np.float32)
