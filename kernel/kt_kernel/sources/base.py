"""What every reader of a quantised checkpoint gives and takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kt_kernel.errors import WeightsError
from kt_kernel.layer_formats import MatrixFormat
from kt_kernel.quantized import GROUPS, Fp8Matrix, GroupedMatrix

__all__ = ["Parts", "Scheme", "Weight", "as_numpy", "grouped", "grouped_format", "need"]

Weight = GroupedMatrix | Fp8Matrix | NDArray[np.float32]
"""A matrix (N channels, K inputs) on its own grid, or float32 where no packed format has that grid."""


@dataclass(frozen=True)
class Parts:
    """The tensors that one weight is stored as: `weight_packed`, `weight_scale`, … under the weight's own name."""

    label: str
    tensors: Mapping[str, NDArray[Any]]

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self.tensors:
            there = ", ".join(sorted(self.tensors)) or "nothing"
            raise WeightsError(f"{self.label} has no {name} (it has {there}); the checkpoint is not whole")
        return self.tensors[name]

    def get(self, name: str) -> NDArray[Any] | None:
        return self.tensors.get(name)


class Scheme(Protocol):
    """One way of storing quantised weights; `parts` are the last names of the tensors it stores a weight as."""

    @property
    def name(self) -> str: ...

    @property
    def parts(self) -> tuple[str, ...]: ...

    @property
    def packed(self) -> MatrixFormat | None:
        """What packs weights of this scheme exactly, as the configuration has it; None where they come as floats. For
        forecasts: the numbers themselves decide when they are packed.
        """

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
        """(N, K) of the weight whose parts have these shapes, one expert's where they are stacked; None for parts that
        make no weight of this scheme, such as those of a module that was left out of the quantisation.
        """

    def decode(self, parts: Parts) -> Weight:
        """The weight (N, K), of the very values that the source means. Raises `WeightsError` that names the weight."""


def as_numpy(tensor: Any) -> NDArray[Any]:
    """A torch tensor's numbers: bfloat16 as float32, 8-bit floats as their bits (uint8), all else as it is."""
    if isinstance(tensor, np.ndarray):
        return tensor
    dtype = str(tensor.dtype)
    if "float8" in dtype:
        import torch

        tensor = tensor.view(torch.uint8)
    elif dtype == "torch.bfloat16":
        tensor = tensor.float()
    array: NDArray[Any] = tensor.numpy()
    return array


def need(condition: bool, parts: Parts, message: str) -> None:
    if not condition:
        raise WeightsError(f"{parts.label}: {message}")


def grouped(
    parts: Parts,
    codes: NDArray[np.integer[Any]],
    scales: NDArray[Any],
    zeros: NDArray[np.integer[Any]] | None,
    bits: int,
    symmetric: bool = True,
) -> GroupedMatrix:
    """scales·(codes − zeros), codes (N, K) from 0 to 2^bits − 1, scales and zeros (N, G); None: zeros at half range.

    Zero points in the middle become signed levels, any others a minimum. The minimum is exact for scales of 16 bits,
    which have 11 digits at most where a zero point has 9; with scales of 32 bits it is rounded once. `symmetric` False:
    a minimum in any case, so that all matrices of a checkpoint with zero points are alike.
    """
    scales = np.ascontiguousarray(scales, dtype=np.float32)
    count = scales.shape[1]
    inputs = codes.shape[1]
    group = _group_size(parts, inputs, count)
    half = 1 << (bits - 1)
    if zeros is None or (symmetric and bool((zeros == half).all())):
        values = (codes.astype(np.int16) - half).astype(np.int8)
        return _regrouped(GroupedMatrix(values, scales, group, "int4" if bits <= 4 else "int8"))
    offset = half if bits == 8 else 0  # 8-bit codes need the sign to fit
    values = (codes.astype(np.int16) - offset).astype(np.int8)
    minimums = -scales * (zeros.astype(np.float32) - np.float32(offset))
    return _regrouped(GroupedMatrix(values, scales, group, "uint4" if bits <= 4 else "int8", minimums))


def grouped_format(bits: int, group: int, symmetric: bool) -> MatrixFormat | None:
    """Of what `grouped` gives. `group` −1: one scale a channel. Scales of 16 bits fit the packed ones, minimums are
    products and do not.
    """
    size = next((g for g in reversed(GROUPS) if group <= 0 or group % g == 0), None)
    if size is None:
        return None
    name, levels = ("INT4", "int4" if symmetric else "uint4") if bits <= 4 else ("INT8_GROUPED", "int8")
    return MatrixFormat(name, size, levels, not symmetric, "float16" if symmetric else "float32")


def _group_size(parts: Parts, inputs: int, count: int) -> int:
    """Inputs per scale: the scales divide the inputs evenly, up to a shorter last group of a usual size."""
    if count == 1:
        return inputs
    if inputs % count == 0:
        return inputs // count
    fitting = [group for group in GROUPS if -(-inputs // group) == count]
    need(len(fitting) == 1, parts, f"{count} scales for {inputs} inputs are no groups of one size")
    return fitting[0]


def _regrouped(matrix: GroupedMatrix) -> GroupedMatrix:
    """With a group that the packed formats have: a larger one is several smaller ones of one scale."""
    inputs = matrix.shape[1]
    if matrix.group in GROUPS:
        return matrix
    if matrix.group >= inputs:  # one scale a channel
        size, repeats = GROUPS[-1], -(-inputs // GROUPS[-1])
    else:
        size = next((g for g in reversed(GROUPS) if matrix.group % g == 0), 0)
        if size == 0:
            raise WeightsError(f"groups of {matrix.group} inputs; packed formats have {', '.join(map(str, GROUPS))}")
        repeats = matrix.group // size
    needed = -(-inputs // size)
    scales = np.ascontiguousarray(np.repeat(matrix.scales, repeats, axis=1)[:, :needed])
    minimums = matrix.minimums
    if minimums is not None:
        minimums = np.ascontiguousarray(np.repeat(minimums, repeats, axis=1)[:, :needed])
    return GroupedMatrix(matrix.values, scales, size, matrix.levels, minimums)
