"""Experts that come quantised: checked against the config, and packed in the format that holds them exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kt_kernel import _ext
from kt_kernel.arrays import as_float32
from kt_kernel.config import MoEConfig
from kt_kernel.errors import WeightsError, translated
from kt_kernel.fp8_weights import pack_fp8
from kt_kernel.layer_formats import LayerFormats, MatrixFormat
from kt_kernel.quantized import GROUPS, LEVELS, Fp8Matrix, GroupedMatrix, QuantizedMatrix
from kt_kernel.weights import allocate

__all__ = ["QuantizedExperts", "held_in", "holds_quantized", "open_quantized", "pack_quantized"]

_WEIGHTS = ("gate_proj", "up_proj", "down_proj")

_Places = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class QuantizedExperts:
    """One matrix an expert and projection, read when it is taken; biases (E, channels) fp32."""

    config: MoEConfig
    projections: Mapping[str, Sequence[QuantizedMatrix]]
    biases: Mapping[str, NDArray[np.float32]]

    @property
    def gated(self) -> bool:
        return "gate_proj" in self.projections

    def formats(self) -> LayerFormats:
        """Those that hold the first expert. Raises `WeightsError` as packing does."""
        is_fp8 = any(isinstance(matrices[0], Fp8Matrix) for matrices in self.projections.values())
        return LayerFormats.both("FP8") if is_fp8 else _formats(self.expert(0))

    def expert(self, index: int) -> dict[str, GroupedMatrix]:
        """Of a grouped layer, checked. Raises `WeightsError` that names the expert and the projection."""
        shapes = _shapes(self.config)
        return {
            name: _checked(matrices[index], f"expert {index}, {name}", shapes[name])
            for name, matrices in self.projections.items()
        }


def holds_quantized(weights: object) -> bool:
    """Whether a weights argument is a dictionary of quantised matrices, one for each expert."""
    if not isinstance(weights, Mapping):
        return False
    return any(_is_quantized(value) for name, value in weights.items() if name in _WEIGHTS)


def _is_quantized(value: object) -> bool:
    if isinstance(value, (list, tuple)):  # of numbers it is a matrix that is no array, which the other door refuses
        return any(isinstance(each, (GroupedMatrix, Fp8Matrix)) for each in value)
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))  # read when it is taken


def held_in(expert: Mapping[str, object]) -> str | None:
    """The format that holds one expert's matrices exactly, where one does for all of them; else None."""
    names = {
        "FP8" if isinstance(matrix, Fp8Matrix) else _name(matrix) if isinstance(matrix, GroupedMatrix) else None
        for matrix in expert.values()
    }
    return names.pop() if len(names) == 1 else None


def open_quantized(weights: Mapping[str, Any], config: MoEConfig, gated: bool) -> QuantizedExperts:
    """Raises `WeightsError` for projections that are missing, too many, or not one matrix for each expert."""
    wanted = set(_WEIGHTS) if gated else {"up_proj", "down_proj"}
    allowed = wanted | {f"{name}_bias" for name in wanted}
    if extra := sorted(str(name) for name in weights if name not in allowed):
        raise WeightsError(f"quantised weights: {', '.join(extra)} beside {', '.join(sorted(wanted))}: leave them out")
    if missing := sorted(wanted - weights.keys()):
        raise WeightsError(f"quantised weights: no {', '.join(missing)}")
    for name in wanted:
        value = weights[name]
        if not isinstance(value, Sequence) or len(value) != config.expert_num:
            has = len(value) if isinstance(value, Sequence) else type(value).__name__
            raise WeightsError(
                f"quantised weights: {name} is one matrix for each of the {config.expert_num} experts, got {has}"
            )
    biases = {
        name: _bias(weights.get(f"{name}_bias"), name, (config.expert_num, _shapes(config)[name][0]))
        for name in _WEIGHTS
        if name in wanted and any(f"{each}_bias" in weights for each in wanted)
    }
    return QuantizedExperts(config, {name: weights[name] for name in _WEIGHTS if name in wanted}, biases)


def pack_quantized(experts: QuantizedExperts, context: _ext.Context) -> _ext.PackedExperts:
    """Lays out every expert on its own grid; no value changes.

    FP8 becomes FP8. Scales of grouped matrices are kept in 16 bits where the first expert's fit; should a later one's
    not, packing begins again with what holds both. Raises `WeightsError` that names expert, projection and place.
    """
    formats = experts.formats()
    if formats.name == "FP8":
        packed = _allocate(experts, formats)
        pack_fp8(packed, context, experts.projections, experts.biases, _shapes(experts.config))
        return packed
    first = experts.expert(0)
    while True:
        packed = _allocate(experts, formats)
        for index in range(experts.config.expert_num):
            matrices = first if index == 0 else experts.expert(index)
            needed = _widened(formats, _formats(matrices), index)
            if needed != formats:
                formats = needed
                break
            _pack_one(packed, context, experts, index, matrices)
        else:
            return packed


def _allocate(experts: QuantizedExperts, formats: LayerFormats) -> _ext.PackedExperts:
    biased = bool(experts.biases)
    return allocate("quantised weights", experts.config, formats, rotate=False, gated=experts.gated, biased=biased)


def _pack_one(
    packed: _ext.PackedExperts,
    context: _ext.Context,
    experts: QuantizedExperts,
    index: int,
    matrices: Mapping[str, GroupedMatrix],
) -> None:
    # Held here so that the addresses stay good.
    arrays = {name: _arrays(matrix) for name, matrix in matrices.items()}
    places = {name: _place(*each) for name, each in arrays.items()}
    biases = [experts.biases[name][index].ctypes.data if name in experts.biases else 0 for name in _WEIGHTS]
    with translated(f"quantised weights, expert {index}"):
        packed.pack_quantized_expert(
            context, index, places.get("gate_proj"), places["up_proj"], places["down_proj"], *biases
        )


_Arrays = tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32] | None]


def _arrays(matrix: GroupedMatrix) -> _Arrays:
    minimums = None if matrix.minimums is None else np.ascontiguousarray(matrix.minimums)
    return np.ascontiguousarray(matrix.values), np.ascontiguousarray(matrix.scales), minimums


def _place(values: NDArray[np.int8], scales: NDArray[np.float32], minimums: NDArray[np.float32] | None) -> _Places:
    third = 0 if minimums is None else minimums.ctypes.data
    return values.ctypes.data, scales.ctypes.data, third, values.shape[1], scales.shape[1]


def _shapes(config: MoEConfig) -> dict[str, tuple[int, int]]:
    wide = (config.intermediate_size, config.hidden_size)
    return {"gate_proj": wide, "up_proj": wide, "down_proj": (wide[1], wide[0])}


def _checked(matrix: object, where: str, shape: tuple[int, int]) -> GroupedMatrix:
    if isinstance(matrix, Fp8Matrix):
        raise WeightsError(f"quantised weights: {where} is FP8 and the first is grouped; a layer is of one kind")
    if not isinstance(matrix, GroupedMatrix):
        raise WeightsError(
            f"quantised weights: {where} is {type(matrix).__name__}, not a GroupedMatrix; a layer is all quantised or "
            "all floats: pass .dequantize() of the others"
        )
    groups = -(-shape[1] // matrix.group) if matrix.group in GROUPS else 0
    if groups == 0:
        raise WeightsError(f"quantised weights: {where} has groups of {matrix.group}; the kernel has {GROUPS}")
    if matrix.levels not in LEVELS:
        raise WeightsError(f"quantised weights: {where} has levels {matrix.levels!r}; the kernel has {list(LEVELS)}")
    for name, array, dtype, expected in (
        ("values", matrix.values, np.int8, shape),
        ("scales", matrix.scales, np.float32, (shape[0], groups)),
        ("minimums", matrix.minimums, np.float32, (shape[0], groups)),
    ):
        if array is not None and (array.dtype != dtype or array.shape != expected):
            raise WeightsError(
                f"quantised weights: {name} of {where} are {array.dtype} {array.shape}; the config makes them "
                f"{np.dtype(dtype)} {expected}"
            )
    return matrix


def _bias(value: object, name: str, shape: tuple[int, int]) -> NDArray[np.float32]:
    """A projection without one gets zeros, which change no sum."""
    if value is None:
        return np.zeros(shape, np.float32)
    bias = as_float32(value)
    if bias.shape != shape:
        raise WeightsError(f"quantised weights: {name}_bias has shape {bias.shape}; the config makes it {shape}")
    return bias


def _formats(matrices: Mapping[str, GroupedMatrix]) -> LayerFormats:
    each = {name: _format(matrix) for name, matrix in matrices.items()}
    gate_up = each["up_proj"]
    if "gate_proj" in each:
        gate_up = _both(each["gate_proj"], gate_up, "gate_proj and up_proj of one expert")
    return LayerFormats(gate_up, each["down_proj"])


def _format(matrix: GroupedMatrix) -> MatrixFormat:
    numbers = matrix.scales if matrix.minimums is None else np.concatenate((matrix.scales, matrix.minimums))
    return MatrixFormat(_name(matrix), matrix.group, matrix.levels, matrix.minimums is not None, _narrowest(numbers))


def _name(matrix: GroupedMatrix) -> str:
    return "INT8_GROUPED" if matrix.levels == "int8" else "INT4"


def _narrowest(numbers: NDArray[np.float32]) -> str:
    """The first dtype that holds all of them. (NaN fits none; packing says where it is.)"""
    with np.errstate(over="ignore"):
        if bool((numbers.astype(np.float16).astype(np.float32) == numbers).all()):
            return "float16"
    # bf16 is fp32 without its lower half.
    return "bfloat16" if not (np.ascontiguousarray(numbers).view(np.uint32) & 0xFFFF).any() else "float32"


def _both(a: MatrixFormat, b: MatrixFormat, what: str) -> MatrixFormat:
    """What holds matrices of either format; they may differ in the dtype of scales alone."""
    if replace(a, scales=b.scales) != b:
        raise WeightsError(f"quantised weights: {what} differ in levels, groups or minimums ({a}, {b})")
    return a if a.scales == b.scales else replace(a, scales="float32")


def _widened(formats: LayerFormats, other: LayerFormats, index: int) -> LayerFormats:
    what = f"expert {index} and those before it"
    return LayerFormats(_both(formats.gate_up, other.gate_up, what), _both(formats.down, other.down, what))
