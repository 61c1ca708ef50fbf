"""INT4 and grouped INT8 through the wrapper: a source's grid is kept exactly; floats become INT4."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from kt_kernel import MoEWrapper, WeightsError, _ext
from kt_kernel.converter import convert
from kt_kernel.quantized import GROUPS, LEVELS, Fp8Matrix, GroupedMatrix, Levels
from tests.kernel.layers import TIERS, Kernel, Layer, make_input, make_layer, relative_error, same_bits

SIZES = {"gate_proj": (72, 160), "up_proj": (72, 160), "down_proj": (160, 72)}
EXPERTS = 3
# Of the activations, which are rounded to 1/127 of 32 neighbours' largest.
ACTIVATIONS = 0.02


def _matrix(
    shape: tuple[int, int], levels: Levels, group: int, *, minimums: bool = False, bits: int = 24, seed: int = 0
) -> GroupedMatrix:
    """Random values and scales of so many significant bits."""
    rng = np.random.default_rng([seed, *shape, group])
    groups = -(-shape[1] // group)

    def numbers() -> NDArray[np.float32]:
        return np.ldexp(rng.integers(1 << (bits - 1), 1 << bits, (shape[0], groups)), -bits - 5).astype(np.float32)

    values = rng.choice(np.array(LEVELS[levels], np.int8), shape)
    return GroupedMatrix(values, numbers(), group, levels, -numbers() if minimums else None)


def _weights(
    levels: Levels, group: int = 32, *, minimums: bool = False, bits: int = 24
) -> dict[str, list[GroupedMatrix]]:
    return {
        name: [
            _matrix(shape, levels, group, minimums=minimums, bits=bits, seed=10 * place + expert)
            for expert in range(EXPERTS)
        ]
        for place, (name, shape) in enumerate(SIZES.items())
    }


def _layer(weights: dict[str, list[GroupedMatrix]]) -> Layer:
    """The floats that the matrices stand for."""
    stacked = {name: np.stack([m.dequantize() for m in matrices]) for name, matrices in weights.items()}
    return Layer(stacked["gate_proj"], stacked["up_proj"], stacked["down_proj"])


def _unpacked(packed: _ext.PackedExperts, expert: int) -> dict[str, NDArray[np.float32]]:
    wide, narrow = (packed.intermediate, packed.hidden), (packed.hidden, packed.intermediate)
    gate, up, down = (np.full(shape, np.nan, np.float32) for shape in (wide, wide, narrow))
    packed.unpack_expert(expert, gate.ctypes.data, up.ctypes.data, down.ctypes.data)
    return {"gate_proj": gate, "up_proj": up, "down_proj": down}


def _load(weights: dict[str, Any], backend: str = "INT4") -> MoEWrapper:
    wrapper = MoEWrapper(make_layer(EXPERTS, 160, 72).config(2), backend=backend, threads=1)
    wrapper.load_weights(weights)
    return wrapper


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("levels", list(LEVELS))
def test_packed_weights_are_the_sources_numbers(levels: Levels, group: int) -> None:
    for minimums, bits in ((False, 8), (False, 11), (True, 24)):
        weights = _weights(levels, group, minimums=minimums, bits=bits)
        wrapper = _load(weights)
        assert wrapper.format == ("INT8_GROUPED" if levels == "int8" else "INT4")
        for expert in range(EXPERTS):
            assert wrapper._packed is not None
            for name, got in _unpacked(wrapper._packed, expert).items():
                np.testing.assert_array_equal(got, weights[name][expert].dequantize())


@pytest.mark.parametrize("levels", list(LEVELS))
def test_outputs_are_those_of_the_sources_numbers(levels: Levels) -> None:
    weights = _weights(levels, 32, minimums=levels == "uint4")
    layer = _layer(weights)
    x, ids, routing = make_input(layer, 24, 2)
    got = _load(weights).forward(x, ids, routing)
    assert relative_error(got, layer.reference(x, ids, routing)) <= ACTIVATIONS


def test_gate_and_up_of_4_bits_with_down_of_6_as_gguf_files_mix_them() -> None:
    weights = _weights("uint4", 32, minimums=True)
    weights["down_proj"] = [_matrix(SIZES["down_proj"], "int8", 16, seed=e) for e in range(EXPERTS)]
    layer = _layer(weights)
    x, ids, routing = make_input(layer, 24, 2)
    wrapper = _load(weights, "auto")
    assert wrapper.format == "INT4+INT8_GROUPED"
    assert relative_error(wrapper.forward(x, ids, routing), layer.reference(x, ids, routing)) <= ACTIVATIONS


def test_scales_take_16_bits_where_all_experts_fit_and_32_where_one_does_not() -> None:
    narrow = _weights("int4", 32, bits=11)
    small = _load(narrow).nbytes
    last = _matrix(SIZES["up_proj"], "int4", 32, bits=24, seed=7)
    wide = {**narrow, "up_proj": [*narrow["up_proj"][:-1], last]}
    wrapper = _load(wide)
    assert wrapper._packed is not None
    assert (wrapper._packed.gate_up.scales, wrapper._packed.down.scales) == ("float32", "float16")
    assert wrapper.nbytes > small
    np.testing.assert_array_equal(_unpacked(wrapper._packed, EXPERTS - 1)["up_proj"], last.dequantize())


def test_biases_come_along() -> None:
    weights: dict[str, Any] = _weights("int4", 32)
    layer = _layer(weights)
    x, ids, routing = make_input(layer, 5, 2)
    ones = np.ones_like(routing)
    down_bias = np.random.default_rng(1).standard_normal((EXPERTS, 160)).astype(np.float32)
    plain = _load(weights).forward(x, ids, ones)
    biased = _load({**weights, "down_proj_bias": down_bias}).forward(x, ids, ones)
    np.testing.assert_allclose(biased - plain, down_bias[ids].sum(axis=1), atol=1e-4)


def _broken(weights: dict[str, Any], name: str, expert: int, **changes: Any) -> dict[str, Any]:
    matrices = list(weights[name])
    matrices[expert] = replace(matrices[expert], **changes)
    return {**weights, name: matrices}


def test_what_is_wrong_with_quantised_weights_is_said_with_its_place() -> None:
    good = _weights("int4", 32)
    values, scales = good["up_proj"][1].values, good["up_proj"][1].scales
    beyond, nan = values.copy(), scales.copy()
    beyond[5, 9], nan[3, 2] = 8, np.nan
    fp8 = Fp8Matrix(np.zeros((72, 160), np.uint8), np.ones((1, 2), np.float32), (128, 128))
    cases: list[tuple[dict[str, Any], str]] = [
        (_broken(good, "up_proj", 1, values=beyond), "expert 1: up value of channel 5, input 9 is 8"),
        (_broken(good, "up_proj", 1, scales=nan), "expert 1: up scale of channel 3, group 2 is NaN"),
        (_broken(good, "up_proj", 1, scales=scales[:, 1:]), r"scales of expert 1, up_proj are float32 \(72, 4\)"),
        (_broken(good, "up_proj", 1, values=values.astype(np.int16)), "values of expert 1, up_proj are int16"),
        (_broken(good, "down_proj", 2, group=48), "expert 2, down_proj has groups of 48"),
        (_broken(good, "down_proj", 2, levels="int5"), "levels 'int5'"),
        (_broken(good, "gate_proj", 0, levels="uint4"), "gate_proj and up_proj of one expert differ"),
        ({**good, "up_proj": good["up_proj"][:2]}, "each of the 3 experts, got 2"),
        ({name: good[name] for name in ("gate_proj", "up_proj")}, "no down_proj"),
        ({**good, "g_idx": [1]}, "g_idx beside"),
        ({**good, "up_proj": [*good["up_proj"][:2], fp8]}, "expert 2, up_proj is FP8"),
        ({**good, "up_proj": [*good["up_proj"][:2], values]}, "all quantised or all floats"),
        ({**good, "down_proj_bias": np.zeros((3, 7), np.float32)}, r"down_proj_bias has shape \(3, 7\)"),
    ]
    for weights, words in cases:
        wrapper = MoEWrapper(make_layer(EXPERTS, 160, 72).config(2), backend="INT4", threads=1)
        with pytest.raises(WeightsError, match=words):
            wrapper.load_weights(weights)
        assert not wrapper.loaded


@pytest.mark.parametrize("tier", TIERS)
def test_int4_of_floats_has_the_same_bits_on_every_tier(tier: str) -> None:
    layer = make_layer(3, 130, 96)
    x, ids, weights = make_input(layer, 20, 2)
    expected = Kernel(layer, "INT4", "generic", top_k=2)(x, ids, weights)
    assert same_bits(Kernel(layer, "INT4", tier, top_k=2)(x, ids, weights), expected)


# Three matrices of about 7.5 % each: 13 % on weights and inputs without any structure.
def test_a_layer_of_floats_in_int4_is_as_close_as_its_three_matrices() -> None:
    layer = make_layer(4, 512, 256)
    heavy = np.random.default_rng(3).standard_t(4, layer.up.shape).astype(np.float32) / np.float32(np.sqrt(2 * 512))
    x, ids, weights = make_input(layer, 64, 2)
    for up in (layer.up, heavy):
        case = replace(layer, up=up)
        got = Kernel(case, "INT4", top_k=2)(x, ids, weights)
        assert relative_error(got, case.reference(x, ids, weights)) <= 0.14


def test_a_converted_int4_layer_is_the_one_quantised_while_loading(tmp_path: Path) -> None:
    layer = make_layer(3, 96, 64)
    tensors = {f"experts.{name}": torch.from_numpy(array) for name, array in layer.weights().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    convert(tmp_path, tmp_path / "out", "AMXINT4", threads=1)
    x, ids, weights = make_input(layer, 9, 2)
    results = []
    for source in (tmp_path / "out", layer.weights()):
        wrapper = MoEWrapper(layer.config(2), backend="AMXINT4", threads=1)
        wrapper.load_weights(source)
        results.append(wrapper.forward(x, ids, weights))
    assert same_bits(*results)
    assert "INT4 on" in wrapper.description
