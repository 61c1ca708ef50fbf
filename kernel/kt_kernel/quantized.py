"""Weights that arrive already quantised, in the two shapes that every source format comes down to.

Readers (GGUF, GPTQ, AWQ, compressed-tensors, MXFP4, FP8 checkpoints) end here; packing begins here. Both keep the
source's own grid: what is packed has exactly the values of the source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["GROUPS", "LEVELS", "Fp8Matrix", "GroupedMatrix", "Levels", "QuantizedMatrix"]

Levels = Literal["int4", "uint4", "e2m1", "int8"]

LEVELS: dict[Levels, tuple[int, ...]] = {
    "int4": tuple(range(-8, 8)),
    "uint4": tuple(range(16)),
    # Twice the values of FP4 e2m1 (OCP Microscaling Formats 1.0, 5.3.3), which are then whole numbers.
    "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12),
    "int8": tuple(range(-128, 128)),
}
"""The whole numbers that a matrix's values may take. All but "int8" fit 4 bits."""

GROUPS = (16, 32, 64, 128)
"""Inputs that share a scale: 16 is Q6_K's, 32 GGUF's and MXFP4's, 64 and 128 those of GPTQ and AWQ."""


@dataclass(frozen=True)
class GroupedMatrix:
    """A weight matrix of N output channels and K inputs: weight[n, k] = scales[n, k // group]·values[n, k] +
    minimums[n, k // group].

    values: int8 (N, K), each one of LEVELS[levels].
    scales: float32 (N, ceil(K / group)).
    minimums: float32 (N, ceil(K / group)), or None for a format without.
    """

    values: NDArray[np.int8]
    scales: NDArray[np.float32]
    group: int
    levels: Levels
    minimums: NDArray[np.float32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def dequantize(self) -> NDArray[np.float32]:
        """float32 (N, K), each step rounded to float32."""
        inputs = self.values.shape[1]
        weights = self.values.astype(np.float32) * np.repeat(self.scales, self.group, axis=1)[:, :inputs]
        if self.minimums is not None:
            weights += np.repeat(self.minimums, self.group, axis=1)[:, :inputs]
        return weights


@dataclass(frozen=True)
class Fp8Matrix:
    """A weight matrix in FP8 e4m3 (OCP 8-bit Floating Point 1.0; no infinities, 0x7f and 0xff are NaN):
    weight[n, k] = e4m3(codes[n, k])·scales[n // block[0], k // block[1]].

    codes: uint8 (N, K), the bit patterns.
    scales: float32 (ceil(N / block[0]), ceil(K / block[1])); what DeepSeek-V3 calls `weight_scale_inv`.
    block: (128, 128) for DeepSeek-V3, (1, K) for one scale a channel.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> NDArray[np.float32]:
        """float32 (N, K)."""
        channels, inputs = self.shape
        scales = np.repeat(np.repeat(self.scales, self.block[0], axis=0), self.block[1], axis=1)
        return _e4m3(self.codes) * scales[:channels, :inputs]


QuantizedMatrix = GroupedMatrix | Fp8Matrix


def _e4m3(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    magnitude = (codes & 0x7F).astype(np.int32)
    exponent, mantissa = magnitude >> 3, (magnitude & 7).astype(np.float32)
    normal = np.ldexp(np.float32(1) + mantissa / np.float32(8), exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa, -9), normal).astype(np.float32)
    values = np.where(magnitude == 0x7F, np.float32(np.nan), values)
    return np.where(codes & 0x80, -values, values).astype(np.float32)
