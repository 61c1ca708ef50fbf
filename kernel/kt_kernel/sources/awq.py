"""AWQ checkpoints (quant_method "awq", version "gemm"), as AutoAWQ writes them.

qweight int32 (K, N/8), qzeros int32 (G, N/8), scales fp16 (G, N); 8 neighbouring channels a word, in AWQ's own order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kt_kernel.errors import WeightsError
from kt_kernel.layer_formats import MatrixFormat
from kt_kernel.sources.base import Parts, Weight, grouped, grouped_format, need
from kt_kernel.sources.bits import AWQ_ORDER, unpack

__all__ = ["Awq"]


class Awq:
    name = "AWQ"
    parts = ("qweight", "qzeros", "scales")

    def __init__(self, config: Mapping[str, Any]) -> None:
        bits, version = int(config.get("bits", config.get("w_bit", 4))), str(config.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise WeightsError(f"AWQ with {bits} bits, version {version!r}; 4 bits, version 'gemm' are read")
        self._group = int(config.get("group_size", config.get("q_group_size", 128)))
        self._symmetric = not config.get("zero_point", True)

    @property
    def packed(self) -> MatrixFormat | None:
        return grouped_format(4, self._group, self._symmetric)

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
        words = shapes.get("qweight")
        return None if words is None else (words[1] * 8, words[0])

    def decode(self, parts: Parts) -> Weight:
        codes = unpack(parts["qweight"], 4, axis=1, order=AWQ_ORDER).T
        scales = parts["scales"].astype(np.float32).T
        need(scales.shape[0] == codes.shape[0], parts, f"{codes.shape[0]} channels and scales of {scales.shape[0]}")
        packed = parts.get("qzeros")  # symmetric files may leave them out
        zeros = None if packed is None else unpack(packed, 4, axis=1, order=AWQ_ORDER).T
        need(zeros is None or zeros.shape == scales.shape, parts, "scales and zero points have different shapes")
        return grouped(parts, codes, scales, zeros, 4, self._symmetric)
