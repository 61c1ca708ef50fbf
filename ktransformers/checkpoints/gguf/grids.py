"""Grids of whole numbers: one that holds matrices of several block types, without changing a value.

Files mix types, in one layer and even between gate and up, and the kernel packs matrices on one grid together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kt_kernel.gguf import BLOCK_TYPES
from kt_kernel.layer_formats import MatrixFormat
from kt_kernel.quantized import GroupedMatrix, Levels

__all__ = ["Grid", "common_grid", "on_grid", "packed_format"]

_SCALES = {**dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"), "float16"), "MXFP4": "bfloat16"}
"""Types whose scales are stored as they are used. Those of the others are products, which 16 bits seldom hold."""


@dataclass(frozen=True)
class Grid:
    """What `GroupedMatrix` has besides its numbers."""

    group: int
    levels: Levels
    has_minimum: bool


def common_grid(types: Iterable[str]) -> Grid:
    """The coarsest that holds matrices of all these block types."""
    blocks = [BLOCK_TYPES[name] for name in types]
    levels = {block.levels for block in blocks}
    common: Levels = levels.pop() if len(levels) == 1 else "int8"  # type: ignore[assignment]  # as in kt_kernel.gguf
    return Grid(min(block.group for block in blocks), common, any(block.has_minimum for block in blocks))


def packed_format(grid: Grid, types: Iterable[str]) -> MatrixFormat:
    """What the kernel packs matrices of these types in, scales as wide as they may have to be."""
    name = "INT8_GROUPED" if grid.levels == "int8" else "INT4"
    widths = {_SCALES.get(kind, "float32") for kind in types}
    scales = widths.pop() if len(widths) == 1 else "float32"
    return MatrixFormat(name, grid.group, grid.levels, grid.has_minimum, scales)


def on_grid(matrix: GroupedMatrix, grid: Grid) -> GroupedMatrix:
    """The same weights: scales repeated for smaller groups, minimums of zero where there are none."""
    finer = matrix.group // grid.group
    scales, minimums = matrix.scales, matrix.minimums
    if minimums is None and grid.has_minimum:
        minimums = np.zeros_like(scales)
    if finer > 1:
        scales = np.repeat(scales, finer, axis=1)
        minimums = None if minimums is None else np.repeat(minimums, finer, axis=1)
    return GroupedMatrix(matrix.values, scales, grid.group, grid.levels, minimums)
