"""Matrices of mixed block types on one grid: no weight changes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kt_kernel.gguf import BLOCK_TYPES, dequantize, unpack
from kt_kernel.quantized import LEVELS
from ktransformers.checkpoints.gguf.grids import Grid, common_grid, on_grid
from tests.kernel.test_gguf_blocks import random_blocks, same_bits


@pytest.mark.parametrize("pair", list(itertools.combinations(BLOCK_TYPES, 2)), ids="+".join)
def test_two_types_on_one_grid_keep_every_weight(pair: tuple[str, str]) -> None:
    grid = common_grid(pair)
    for name in pair:
        data = random_blocks(name, 3, 8 * 32 // BLOCK_TYPES[name].weights)
        matrix = on_grid(unpack(name, data), grid)
        assert (matrix.group, matrix.levels, matrix.minimums is not None) == (
            grid.group,
            grid.levels,
            grid.has_minimum,
        )
        assert set(np.unique(matrix.values).tolist()) <= set(LEVELS[matrix.levels])
        # Adding a minimum of zero turns -0 into 0.
        assert same_bits(matrix.dequantize() + 0, dequantize(name, data) + np.float32(0))


def test_types_that_agree_keep_their_own_grid() -> None:
    assert common_grid(["Q4_K"]) == Grid(32, "uint4", True)
    assert common_grid(["Q4_0", "Q4_0"]) == Grid(32, "int4", False)
    assert common_grid(["Q4_K", "Q6_K"]) == Grid(16, "int8", True)
