"""GPTQ checkpoints (quant_method "gptq"), as GPTQModel and AutoGPTQ write them.

qweight int32 (K·bits/32, N), qzeros int32 (G, N·bits/32), scales fp16 (G, N), g_idx int32 (K): the group of an input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kt_kernel.errors import WeightsError
from kt_kernel.layer_formats import MatrixFormat
from kt_kernel.sources.base import Parts, Weight, grouped, grouped_format, need
from kt_kernel.sources.bits import unpack

__all__ = ["Gptq"]

_BITS = (2, 4, 8)


class Gptq:
    name = "GPTQ"
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._bits = int(config.get("bits", 4))
        if self._bits not in _BITS:
            raise WeightsError(f"GPTQ with {self._bits} bits; {', '.join(map(str, _BITS))} are read")
        self._symmetric = bool(config.get("sym", True))
        self._group = int(config.get("group_size", 128))
        self._reordered = bool(config.get("desc_act", False))
        # The first format stores zero points less one.
        self._zero_offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    @property
    def packed(self) -> MatrixFormat | None:
        return None if self._reordered else grouped_format(self._bits, self._group, self._symmetric)

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
        words = shapes.get("qweight")
        return None if words is None else (words[1], words[0] * (32 // self._bits))

    def decode(self, parts: Parts) -> Weight:
        """Weights whose inputs were reordered (desc_act) lie in no contiguous groups: they come as float32."""
        codes = unpack(parts["qweight"], self._bits, axis=0).T
        inputs = codes.shape[1]
        scales = parts["scales"].astype(np.float32).T
        zeros = unpack(parts["qzeros"], self._bits, axis=1).astype(np.int16).T + self._zero_offset
        need(scales.shape == zeros.shape, parts, f"scales {scales.T.shape} and zero points {zeros.T.shape} differ")
        need(scales.shape[0] == codes.shape[0], parts, f"{codes.shape[0]} channels and scales of {scales.shape[0]}")
        index = parts.get("g_idx")
        if index is not None and not _is_ordered(index, inputs, scales.shape[1]):
            need(index.shape == (inputs,), parts, f"g_idx has shape {index.shape}, and there are {inputs} inputs")
            there = int(index.min()) >= 0 and int(index.max()) < scales.shape[1]
            need(there, parts, "g_idx names groups that have no scale")
            weights: Weight = scales[:, index] * (codes.astype(np.float32) - zeros[:, index].astype(np.float32))
            return weights
        return grouped(parts, codes, scales, zeros, self._bits, self._symmetric)


def _is_ordered(index: np.ndarray[Any, Any], inputs: int, groups: int) -> bool:
    size = -(-inputs // groups)
    return index.shape == (inputs,) and bool((index == np.arange(inputs) // size).all())
