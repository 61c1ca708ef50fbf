"""compressed-tensors checkpoints (quant_method "compressed-tensors"), as llm-compressor writes them.

pack-quantized: weight_packed int32 (N, ⌈K·bits/32⌉), codes offset by half their range; weight_scale (N, G);
weight_zero_point int32, packed along N; weight_shape (2); weight_g_idx (K) where inputs were reordered.
int-quantized: weight int8 (N, K), weight_scale (N, G). float-quantized: weight e4m3 (N, K), weight_scale.
nvfp4-pack-quantized, mxfp4-pack-quantized: weight_packed uint8 (N, K/2), weight_scale of 8 bits, weight_global_scale
fp32, which divides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kt_kernel.errors import WeightsError
from kt_kernel.layer_formats import MatrixFormat
from kt_kernel.sources.base import Parts, Weight, grouped, grouped_format, need
from kt_kernel.sources.bits import unpack
from kt_kernel.sources.fp4 import E2M1, e2m1_matrix, e4m3
from kt_kernel.sources.fp8 import e8m0, fp8_matrix

__all__ = ["CompressedTensors"]

_BITS = (4, 8)
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")


class CompressedTensors:
    parts = (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "weight_global_scale",
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        weights = _one_scheme(config)
        self._format = str(weights.get("format") or config.get("format") or "")
        if self._format == "naive-quantized":
            self._format = "float-quantized" if weights.get("type") == "float" else "int-quantized"
        if self._format not in _FORMATS:
            raise WeightsError(f"compressed-tensors format {self._format!r}; {', '.join(_FORMATS)} are read")
        self._bits = int(weights.get("num_bits", 8))
        if self._format == "pack-quantized" and self._bits not in _BITS:
            raise WeightsError(f"compressed-tensors with {self._bits} bits; {', '.join(map(str, _BITS))} are read")
        self._symmetric = bool(weights.get("symmetric", True))
        self._group = int(weights.get("group_size") or -1)
        self._reordered = weights.get("actorder") == "group"
        block = weights.get("block_structure")
        self._block = None if block is None else (int(block[0]), int(block[1]))
        self.name = f"compressed-tensors {self._format}"

    @property
    def packed(self) -> MatrixFormat | None:
        if self._format == "float-quantized":
            return MatrixFormat("FP8")
        if self._format == "mxfp4-pack-quantized":
            return E2M1
        if self._format == "nvfp4-pack-quantized":
            return MatrixFormat("INT4", 16, "e2m1")
        return None if self._reordered else grouped_format(self._bits, self._group, self._symmetric)

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
        """The inputs of packed weights as if they filled their last word, which those of real models do."""
        if "weight_scale" not in shapes:
            return None
        if "weight" in shapes:
            return shapes["weight"][0], shapes["weight"][1]
        channels, words = shapes["weight_packed"]
        return channels, words * (32 // self._bits if self._format == "pack-quantized" else 2)

    def decode(self, parts: Parts) -> Weight:
        if self._format == "pack-quantized":
            return self._packed(parts)
        if self._format == "int-quantized":
            codes = parts["weight"]
            need(codes.dtype == np.int8 and codes.ndim == 2, parts, f"no matrix of int8, but {codes.dtype}")
            zeros = parts.get("weight_zero_point")
            need(zeros is None or not zeros.any(), parts, "8-bit weights with zero points are not read")
            unsigned = (codes.astype(np.int16) + 128).astype(np.uint8)
            return grouped(parts, unsigned, _scales(parts, codes.shape[0]), None, 8)
        if self._format == "float-quantized":
            return fp8_matrix(parts, parts["weight_scale"], self._block)
        packed, scales = parts["weight_packed"], parts["weight_scale"]
        if self._format == "mxfp4-pack-quantized":
            return e2m1_matrix(parts, packed, e8m0(scales), 32)
        divisor = parts["weight_global_scale"]
        need(divisor.size == 1, parts, f"weight_global_scale has {divisor.size} numbers, not one")
        return e2m1_matrix(parts, packed, e4m3(scales) / np.float32(divisor.item()), 16)

    def _packed(self, parts: Parts) -> Weight:
        channels, inputs = (int(size) for size in parts["weight_shape"])
        packed = parts["weight_packed"]
        expected = (channels, -(-inputs * self._bits // 32))
        need(
            packed.shape == expected, parts, f"weight_packed has shape {packed.shape}; weight_shape makes it {expected}"
        )
        codes = unpack(packed, self._bits, axis=1)[:, :inputs]
        scales = _scales(parts, channels)
        zeros = parts.get("weight_zero_point")
        if zeros is not None:
            zeros = unpack(zeros, self._bits, axis=0)[:channels]
            need(zeros.shape == scales.shape, parts, f"zero points {zeros.shape} and scales {scales.shape} differ")
        index = parts.get("weight_g_idx")
        if index is None or bool((index < 0).all()):  # −1 throughout: not reordered
            return grouped(parts, codes, scales, zeros, self._bits, self._symmetric)
        need(index.shape == (inputs,), parts, f"weight_g_idx has shape {index.shape}, and there are {inputs} inputs")
        offsets = (
            np.full(scales.shape, 1 << (self._bits - 1), np.float32) if zeros is None else zeros.astype(np.float32)
        )
        weights: Weight = scales[:, index] * (codes.astype(np.float32) - offsets[:, index])
        return weights


def _scales(parts: Parts, channels: int) -> NDArray[np.float32]:
    scales = parts["weight_scale"].astype(np.float32)
    if scales.size == 1:
        return np.full((channels, 1), scales.item(), np.float32)
    scales = scales.reshape(channels, -1) if scales.ndim == 1 else scales
    need(scales.ndim == 2 and scales.shape[0] == channels, parts, f"{channels} channels, scales {scales.shape}")
    return scales


def _one_scheme(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights' arguments of the configuration's groups, with the group's own format; all groups have to agree."""
    groups = config.get("config_groups") or {}
    found = [
        {**(group.get("weights") or {}), "format": group.get("format")}
        for group in groups.values()
        if group.get("weights")
    ]
    if not found:
        raise WeightsError("the compressed-tensors configuration has no group with quantised weights")
    keys = ("format", "num_bits", "type", "block_structure")
    if any([group.get(key) for key in keys] != [found[0].get(key) for key in keys] for group in found):
        raise WeightsError(
            "the compressed-tensors configuration quantises its groups in different formats; one is read"
        )
    return found[0]
