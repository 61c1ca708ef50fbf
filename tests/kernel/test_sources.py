"""Every storage scheme of quantised weights is read to exactly the values that its files mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kt_kernel import WeightsError
from kt_kernel.quantized import GROUPS, LEVELS, Fp8Matrix, GroupedMatrix
from kt_kernel.sources import Parts, Weight, as_numpy, scheme_for
from tests.kernel import quantizers
from tests.kernel.quantizers import Grid, Stored

GPTQ = {"quant_method": "gptq", "bits": 4}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def _packed(bits: int = 4, kind: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", **weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}


def _read(config: dict[str, Any], stored: Stored) -> Weight:
    tensors = {name: as_numpy(tensor) for name, tensor in stored.tensors.items()}
    return scheme_for(config).decode(Parts("experts.0.up_proj", tensors))


def _assert_same(config: dict[str, Any], stored: Stored, kind: type = GroupedMatrix) -> Any:
    weight = _read(config, stored)
    assert isinstance(weight, kind)
    if isinstance(weight, GroupedMatrix):
        assert weight.group in GROUPS
        assert set(np.unique(weight.values)) <= set(LEVELS[weight.levels])
        assert weight.scales.shape == (weight.shape[0], -(-weight.shape[1] // weight.group))
    values = weight if isinstance(weight, np.ndarray) else weight.dequantize()
    np.testing.assert_array_equal(values, stored.meaning)
    return weight


@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq(group: int, symmetric: bool) -> None:
    weight = _assert_same(GPTQ, quantizers.gptq(Grid.make(24, 256, group, symmetric=symmetric)))
    assert (weight.levels, weight.group) == ("int4" if symmetric else "uint4", group)
    assert (weight.minimums is None) == symmetric


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_of_other_widths(bits: int, symmetric: bool) -> None:
    grid = Grid.make(16, 128, 32, bits=bits, symmetric=symmetric)
    _assert_same({**GPTQ, "bits": bits}, quantizers.gptq(grid, bits))


def test_gptq_of_the_second_format_stores_zero_points_as_they_are() -> None:
    stored = quantizers.gptq(Grid.make(16, 64, 32), offset=0)
    _assert_same({**GPTQ, "checkpoint_format": "gptq_v2"}, stored)


def test_gptq_with_reordered_inputs_comes_as_floats() -> None:
    index = np.random.default_rng(0).permutation(np.arange(128) // 32)
    _assert_same({**GPTQ, "desc_act": True}, quantizers.gptq(Grid.make(16, 128, 32), index=index), np.ndarray)


def test_one_scale_a_channel_becomes_groups_of_equal_scale() -> None:
    assert _assert_same(GPTQ, quantizers.gptq(Grid.make(16, 200, 200))).group == 128


def test_large_groups_become_several_of_one_scale() -> None:
    assert _assert_same(GPTQ, quantizers.gptq(Grid.make(16, 512, 256))).group == 128


def test_a_shorter_last_group() -> None:
    assert _assert_same(_packed(), quantizers.compressed(Grid.make(16, 80, 32, symmetric=True))).group == 32


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq(symmetric: bool) -> None:
    _assert_same(AWQ, quantizers.awq(Grid.make(32, 128, 64, symmetric=symmetric)))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors(bits: int, symmetric: bool) -> None:
    grid = Grid.make(24, 96, 32, bits=bits, symmetric=symmetric)
    _assert_same(_packed(bits), quantizers.compressed(grid, bits, symmetric))


def test_compressed_tensors_with_reordered_inputs_come_as_floats() -> None:
    index = np.random.default_rng(0).permutation(np.arange(96) // 32)
    _assert_same(_packed(), quantizers.compressed(Grid.make(8, 96, 32, symmetric=True), index=index), np.ndarray)


def test_compressed_tensors_marked_as_not_reordered() -> None:
    stored = quantizers.compressed(Grid.make(8, 96, 32, symmetric=True))
    stored.tensors["weight_g_idx"] = torch.full((96,), -1, dtype=torch.int32)
    _assert_same(_packed(), stored)


def test_compressed_tensors_of_plain_int8() -> None:
    weight = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).reshape(2, 128)
    scale = torch.tensor([[0.5], [0.25]])
    stored = Stored({"weight": weight, "weight_scale": scale}, (weight.float() * scale).numpy())
    _assert_same(_packed(8, "int-quantized"), stored)


def test_compressed_tensors_of_plain_fp8() -> None:
    config = _packed(8, "float-quantized", type="float")
    _assert_same(config, quantizers.fp8(40, 96, None, "weight_scale"), Fp8Matrix)


def test_compressed_tensors_in_blocks_of_fp8() -> None:
    config = _packed(8, "naive-quantized", type="float", block_structure=[128, 128])
    _assert_same(config, quantizers.fp8(200, 300, (128, 128), "weight_scale"), Fp8Matrix)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(channels=st.integers(1, 300), inputs=st.integers(1, 300))
def test_fp8_in_blocks_of_any_shape(channels: int, inputs: int) -> None:
    _assert_same(FP8, quantizers.fp8(channels, inputs, (128, 128), "weight_scale_inv"), Fp8Matrix)


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
def test_fp8_with_one_scale_a_channel(method: str) -> None:
    _assert_same({"quant_method": method}, quantizers.fp8(40, 96, None, "weight_scale"), Fp8Matrix)


def test_fp8_scales_as_powers_of_two() -> None:
    stored = quantizers.fp8(128, 256, (128, 128), "weight_scale_inv")
    bits = torch.tensor([[120, 130]], dtype=torch.uint8)
    stored.tensors["weight_scale_inv"] = bits.view(torch.float8_e8m0fnu)
    weight = _read(FP8, stored)
    assert isinstance(weight, Fp8Matrix)
    assert weight.scales.tolist() == [[2.0**-7, 2.0**3]]


def test_mxfp4_of_gpt_oss() -> None:
    weight = _assert_same({"quant_method": "mxfp4"}, quantizers.mxfp4(24, 96))
    assert (weight.levels, weight.group) == ("e2m1", 32)


def test_compressed_tensors_of_mxfp4() -> None:
    stored = quantizers.mxfp4(24, 96)
    tensors = {"weight_packed": stored.tensors["blocks"].reshape(24, 48), "weight_scale": stored.tensors["scales"]}
    _assert_same(_packed(4, "mxfp4-pack-quantized", type="float"), Stored(tensors, stored.meaning))


def test_compressed_tensors_of_nvfp4_divide_by_the_global_scale() -> None:
    stored = quantizers.mxfp4(8, 32)
    scale = torch.tensor([[1.5, 0.25]] * 8).to(torch.float8_e4m3fn)
    tensors = {
        "weight_packed": stored.tensors["blocks"].reshape(8, 16),
        "weight_scale": scale,
        "weight_global_scale": torch.tensor([4.0]),
    }
    codes = quantizers.E2M1[_codes(tensors["weight_packed"])]
    meaning = codes * np.repeat(scale.float().numpy() / 4, 16, axis=1)
    assert _assert_same(_packed(4, "nvfp4-pack-quantized", type="float"), Stored(tensors, meaning)).group == 16


def _codes(packed: torch.Tensor) -> np.ndarray:
    low, high = packed.numpy() & 15, packed.numpy() >> 4
    return np.stack([low, high], axis=-1).reshape(packed.shape[0], -1)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "hqq"}, "quantised by 'hqq'.*awq, compressed-tensors"),
        ({"quant_method": "gtpq"}, "gptq"),
        ({}, "quantised by None"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}}, "no group"),
        (_packed(4, "marlin-24"), "marlin-24"),
        (_packed(3), "3 bits"),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: dict[str, Any], says: str) -> None:
    with pytest.raises(WeightsError, match=says):
        scheme_for(config)


def test_groups_of_different_formats_are_refused() -> None:
    config = _packed()
    config["config_groups"]["group_1"] = {"weights": {"num_bits": 8, "type": "int"}}
    with pytest.raises(WeightsError, match="different formats"):
        scheme_for(config)


@pytest.mark.parametrize(
    ("config", "stored", "lost"),
    [
        (GPTQ, quantizers.gptq(Grid.make(16, 64, 32)), "scales"),
        (AWQ, quantizers.awq(Grid.make(16, 64, 32)), "qweight"),
        (_packed(), quantizers.compressed(Grid.make(16, 64, 32)), "weight_scale"),
        (FP8, quantizers.fp8(16, 64, (128, 128), "weight_scale_inv"), "weight_scale"),
        ({"quant_method": "mxfp4"}, quantizers.mxfp4(8, 64), "scales"),
    ],
)
def test_a_missing_part_is_named_with_its_weight(config: dict[str, Any], stored: Stored, lost: str) -> None:
    kept = {name: tensor for name, tensor in stored.tensors.items() if not name.startswith(lost)}
    with pytest.raises(WeightsError, match=rf"experts\.0\.up_proj has no {lost}"):
        _read(config, Stored(kept, stored.meaning))


@pytest.mark.parametrize(
    ("config", "stored", "part", "says"),
    [
        (GPTQ, quantizers.gptq(Grid.make(16, 64, 32)), "scales", "zero points"),
        (_packed(), quantizers.compressed(Grid.make(16, 64, 32)), "weight_packed", "weight_shape makes it"),
        (FP8, quantizers.fp8(300, 300, (128, 128), "weight_scale_inv"), "weight_scale_inv", "make it"),
        ({"quant_method": "mxfp4"}, quantizers.mxfp4(8, 64), "scales", "make it"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(
    config: dict[str, Any], stored: Stored, part: str, says: str
) -> None:
    cut = {**stored.tensors, part: stored.tensors[part][:-1]}
    with pytest.raises(WeightsError, match=says):
        _read(config, Stored(cut, stored.meaning))
