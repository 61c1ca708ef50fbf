"""The two shapes of weights that arrive quantised: what their numbers mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kt_kernel.quantized import LEVELS, Fp8Matrix, GroupedMatrix


def test_a_grouped_matrix_is_scale_times_value_plus_minimum_of_its_group() -> None:
    matrix = GroupedMatrix(
        values=np.array([[1, -2, 3]], np.int8),
        scales=np.array([[0.5, 4.0]], np.float32),
        group=2,
        levels="int8",
        minimums=np.array([[0.25, -1.0]], np.float32),
    )
    assert matrix.shape == (1, 3)
    assert matrix.dequantize().tolist() == [[0.75, -0.75, 11.0]]


def test_every_fp8_code_has_the_value_torch_gives_it() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    ours = Fp8Matrix(codes, np.ones((1, 1), np.float32), (128, 128)).dequantize()
    theirs = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("block", "scales"), [((2, 2), [[1.0, 2.0], [4.0, 8.0]]), ((1, 3), [[1.0], [2.0], [4.0]])])
def test_fp8_scales_belong_to_their_block(block: tuple[int, int], scales: list[list[float]]) -> None:
    one = np.full((3, 3), 0x38, np.uint8)  # 1.0
    weights = Fp8Matrix(one, np.array(scales, np.float32), block).dequantize()
    for n in range(3):
        for k in range(3):
            assert weights[n, k] == scales[n // block[0]][k // block[1]]


def test_all_levels_but_int8_fit_four_bits() -> None:
    assert {name: len(values) <= 16 for name, values in LEVELS.items()} == {
        "int4": True,
        "uint4": True,
        "e2m1": True,
        "int8": False,
    }
