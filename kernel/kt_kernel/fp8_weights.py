"""Experts that come in FP8: checked against the config, and laid out with the source's own codes and scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kt_kernel import _ext
from kt_kernel.errors import WeightsError, translated
from kt_kernel.quantized import Fp8Matrix

__all__ = ["pack_fp8"]


def pack_fp8(
    packed: _ext.PackedExperts,
    context: _ext.Context,
    projections: Mapping[str, Sequence[object]],
    biases: Mapping[str, NDArray[np.float32]],
    shapes: Mapping[str, tuple[int, int]],
) -> None:
    """Lays out every expert; no value changes. biases: (E, channels) of every projection, or none.

    Raises `WeightsError` that names expert, projection and place.
    """
    for index in range(packed.experts):
        matrices = {
            name: _checked(each[index], f"expert {index}, {name}", shapes[name]) for name, each in projections.items()
        }
        # Held here so that the addresses stay good.
        scales = {name: np.ascontiguousarray(matrix.scales) for name, matrix in matrices.items()}
        views = {
            name: _ext.Fp8View(
                matrix.codes.ctypes.data,
                matrix.codes.strides,
                scales[name].ctypes.data,
                scales[name].shape[1],
                matrix.block,
                biases[name][index].ctypes.data if name in biases else 0,
            )
            for name, matrix in matrices.items()
        }
        gate = views.get("gate_proj", _ext.Fp8View())
        with translated(f"quantised weights, expert {index}"):
            packed.pack_fp8_expert(context, index, gate, views["up_proj"], views["down_proj"])


def _checked(matrix: object, where: str, shape: tuple[int, int]) -> Fp8Matrix:
    if not isinstance(matrix, Fp8Matrix):
        raise WeightsError(
            f"quantised weights: {where} is {type(matrix).__name__}, not an Fp8Matrix; a layer is all "
            "FP8, all grouped or all floats: pass .dequantize() of all"
        )
    height, width = matrix.block
    if height < 1 or width < 1:
        raise WeightsError(f"quantised weights: {where} has a scale for {height} x {width} weights")
    for name, array, dtype, expected in (
        ("codes", matrix.codes, np.uint8, shape),
        ("scales", matrix.scales, np.float32, (-(-shape[0] // height), -(-shape[1] // width))),
    ):
        if array.dtype != dtype or array.shape != expected:
            raise WeightsError(
                f"quantised weights: {name} of {where} are {array.dtype} {array.shape}; the config makes them "
                f"{np.dtype(dtype)} {expected}"
            )
    return matrix
