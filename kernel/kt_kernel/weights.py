"""Reads one layer's experts, checked against the config, and packs them, expert by expert."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kt_kernel import _ext
from kt_kernel.arrays import Array, as_float32
from kt_kernel.checkpoint import open_dictionary, open_path
from kt_kernel.config import MoEConfig
from kt_kernel.errors import WeightsError, translated
from kt_kernel.layer_check import check_layer
from kt_kernel.layer_formats import LayerFormats
from kt_kernel.naming import BIAS, Layer, find_layer

__all__ = ["ExpertWeights", "allocate", "open_weights", "pack"]

Bias = np.ndarray[tuple[int], np.dtype[np.float32]]


@dataclass(frozen=True)
class Expert:
    """gate (I, H) or None, up (I, H), down (H, I), and the biases (I), (I), (H) of a layer that has them."""

    gate: Array | None
    up: Array
    down: Array
    biases: tuple[Bias, Bias, Bias] | None


@dataclass(frozen=True)
class ExpertWeights:
    """One layer's experts, checked: complete, of the config's shapes, one float dtype."""

    layer: Layer
    config: MoEConfig
    dtype: str
    gated: bool

    @property
    def biased(self) -> bool:
        """Whether any projection has biases."""
        return any(self._has(name + BIAS) for name in ("gate", "up", "down", "gate_up"))

    def expert(self, index: int) -> Expert:
        """One expert, read now."""
        size = self.config.intermediate_size
        down, biases = self._read("down", index), self._biases(index) if self.biased else None
        if self._has("gate_up"):
            both = self._read("gate_up", index)
            return Expert(both.rows(0, size), both.rows(size, 2 * size), down, biases)
        return Expert(self._read("gate", index) if self.gated else None, self._read("up", index), down, biases)

    def _biases(self, index: int) -> tuple[Bias, Bias, Bias]:
        """Of gate, up and down. A projection without one gets zeros, which change no sum."""
        size = self.config.intermediate_size
        down = self._bias("down", index, self.config.hidden_size)
        if self._has("gate_up"):
            both = self._bias("gate_up", index, 2 * size)
            return both[:size], both[size:], down
        return self._bias("gate", index, size), self._bias("up", index, size), down

    def _bias(self, projection: str, index: int, size: int) -> Bias:
        if not self._has(projection + BIAS):
            return np.zeros(size, np.float32)
        return as_float32(self._read(projection + BIAS, index).owner)

    def _has(self, projection: str) -> bool:
        return projection in self.layer.stacked or (projection, 0) in self.layer.single

    def _read(self, projection: str, expert: int) -> Array:
        if projection in self.layer.stacked:
            return self.layer.stacked[projection].array(expert)
        return self.layer.single[projection, expert].array(None)


@contextmanager
def open_weights(
    source: Mapping[str, Any] | str | os.PathLike[str], config: MoEConfig, gated: bool, prefix: str | None = None
) -> Iterator[ExpertWeights]:
    """The experts of a dictionary, a safetensors file or a folder, closed at the end. Raises `WeightsError`."""
    with ExitStack() as stack:
        if isinstance(source, Mapping):
            where, entries = "the weights dictionary", open_dictionary(source)
        elif isinstance(source, (str, os.PathLike)):
            where, entries = os.fspath(source), open_path(Path(source), stack)
        else:
            raise WeightsError(f"weights are a dictionary of arrays or a path, not {type(source).__name__}")
        layer = find_layer(entries, where, prefix)
        yield ExpertWeights(layer, config, check_layer(layer, config, gated), gated)


def allocate(
    label: str, config: MoEConfig, formats: LayerFormats, *, rotate: bool, gated: bool, biased: bool
) -> _ext.PackedExperts:
    """Memory for a layer's packed experts. Raises `MemoryError` that names the layer and the bytes."""
    sizes = config.expert_num, config.hidden_size, config.intermediate_size
    try:
        return formats.allocate(*sizes, rotate=rotate, gated=gated, biased=biased)
    except MemoryError:
        bits = (2 if gated else 1) * formats.gate_up.bits + formats.down.bits
        least = math.prod(sizes) * bits // 8
        raise MemoryError(
            f"{label}: no memory for its packed {formats.name} weights, {least} bytes ({least / 2**30:.1f} GiB) or a "
            "little more; free some, raise the process's limit, or give fewer layers to the kernel"
        ) from None


def pack(
    weights: ExpertWeights, context: _ext.Context, tier: str, formats: LayerFormats, rotate: bool
) -> _ext.PackedExperts:
    """Quantises and lays out every expert. Between two experts Ctrl-C is heard.

    Raises `WeightsError` that names the expert, the projection and the place of a weight that is NaN or infinite, and
    `MemoryError` that names the layer and the bytes.
    """
    config = weights.config
    label = weights.layer.label
    packed = allocate(label, config, formats, rotate=rotate, gated=weights.gated, biased=weights.biased)
    for index in range(config.expert_num):
        expert = weights.expert(index)
        with translated(f"{label}, expert {index}"):
            packed.pack_expert(
                context,
                tier,
                index,
                *_place(expert.gate),
                *_place(expert.up),
                *_place(expert.down),
                weights.dtype,
                *(bias.ctypes.data for bias in expert.biases or ()),
            )
    return packed


def _place(matrix: Array | None) -> tuple[int, tuple[int, int]]:
    """Address and strides; nothing for the gate that is not there."""
    return (0, (0, 0)) if matrix is None else (matrix.address, (matrix.strides[0], matrix.strides[1]))
