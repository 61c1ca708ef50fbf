"""FP4 e2m1 weights: MXFP4 (groups of 32, power-of-two scales) and NVFP4 (groups of 16, e4m3 scales and one fp32)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kt_kernel.layer_formats import MatrixFormat
from kt_kernel.quantized import Fp8Matrix, GroupedMatrix
from kt_kernel.sources.base import Parts, Weight, need
from kt_kernel.sources.bits import nibbles
from kt_kernel.sources.fp8 import e8m0

__all__ = ["E2M1", "Mxfp4", "e2m1_matrix", "e4m3"]

# Twice the value of a code, bit 3 its sign (OCP Microscaling Formats 1.0, 5.3.3); −0 is 0.
_TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_HALF = np.float32(0.5)

E2M1 = MatrixFormat("INT4", 32, "e2m1", scales="bfloat16")
"""What packs MXFP4 exactly: its scales are powers of two."""


class Mxfp4:
    """gpt-oss (quant_method "mxfp4"): blocks uint8 (N, K/32, 16), low half of a byte first; scales e8m0 (N, K/32)."""

    name = "MXFP4"
    parts = ("blocks", "scales")

    def __init__(self, config: Mapping[str, Any]) -> None:
        del config  # the format has no parameters

    @property
    def packed(self) -> MatrixFormat:
        return E2M1

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
        blocks = shapes.get("blocks")
        return None if blocks is None else (blocks[-3], blocks[-2] * 32)

    def decode(self, parts: Parts) -> Weight:
        blocks = parts["blocks"]
        need(blocks.ndim == 3 and blocks.shape[2] == 16, parts, f"blocks of shape {blocks.shape}, not (N, K/32, 16)")
        return e2m1_matrix(parts, blocks.reshape(blocks.shape[0], -1), e8m0(parts["scales"]), 32)


def e4m3(bits: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The values of e4m3 bit patterns (N, G)."""
    return Fp8Matrix(bits, np.ones((1, 1), np.float32), bits.shape).dequantize()


def e2m1_matrix(parts: Parts, packed: NDArray[np.uint8], scales: NDArray[np.float32], group: int) -> GroupedMatrix:
    """packed (N, K/2), scales (N, K/group) of the values themselves; the matrix holds twice the values."""
    values = _TWICE[nibbles(packed)]
    expected = (values.shape[0], -(-values.shape[1] // group))
    need(scales.shape == expected, parts, f"scales of shape {scales.shape}; groups of {group} make it {expected}")
    return GroupedMatrix(values, np.ascontiguousarray(scales * _HALF), group, "e2m1")
