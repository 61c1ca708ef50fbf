"""FP8 weights: from floats, and from checkpoints' own codes with block or channel scales, which keep their values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from kt_kernel import MoEWrapper, WeightsError
from kt_kernel.converter import convert
from kt_kernel.quantized import Fp8Matrix
from tests.kernel.layers import TIER_FORMATS, Layer, make_input, make_layer, relative_error, same_bits

Floats = NDArray[np.float32]

TIERS = [tier for tier, format in TIER_FORMATS if format == "FP8"]
BACKENDS = ["FP8", "AMXFP8", "AVX512FP8", "AVX2FP8"]
LAYER = make_layer(3, 300, 200)
X, IDS, WEIGHTS = make_input(LAYER, 20, 2)
# Inputs and activated values are rounded to bf16, 2^-9 of themselves on average, and that is all.
ACTIVATIONS_ONLY = 0.006


def _fp8(weights: Floats, block: tuple[int, int]) -> Fp8Matrix:
    """As DeepSeek-V3's checkpoints are made: a block's largest magnitude becomes 448."""
    channels, inputs = weights.shape
    scales = np.zeros((-(-channels // block[0]), -(-inputs // block[1])), np.float32)
    codes = np.zeros(weights.shape, np.uint8)
    for i, j in np.ndindex(scales.shape):
        part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        scales[i, j] = np.abs(weights[part]).max() / np.float32(448)
        scaled = torch.from_numpy(weights[part] / scales[i, j])
        codes[part] = scaled.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return Fp8Matrix(codes, scales, block)


def _listed(layer: Layer, block: tuple[int, int] | None = (128, 128)) -> dict[str, Any]:
    """block None: a scale for each channel."""
    return {
        name: [_fp8(weights, block or (1, weights.shape[1])) for weights in stacked]
        for name, stacked in layer.weights().items()
    }


def _dequantized(layer: Layer, listed: dict[str, Any]) -> Layer:
    stacks = {
        name: np.stack([matrix.dequantize() for matrix in listed[f"{name}_proj"]]) for name in ("gate", "up", "down")
    }
    return replace(layer, **stacks)


def _output(weights: Any, backend: str = "FP8", layer: Layer = LAYER, **options: Any) -> Any:
    wrapper = MoEWrapper(layer.config(2), backend=backend, threads=2, **options)
    wrapper.load_weights(weights)
    return wrapper.forward(X, IDS, WEIGHTS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block", [(128, 128), None], ids=["block scales", "channel scales"])
def test_an_fp8_checkpoint_keeps_its_values_in_an_fp8_backend(backend: str, block: tuple[int, int] | None) -> None:
    listed = _listed(LAYER, block)
    expected = _dequantized(LAYER, listed).reference(X, IDS, WEIGHTS)
    assert relative_error(_output(listed, backend), expected) <= ACTIVATIONS_ONLY


@pytest.mark.parametrize("block", [(128, 128), (1, 300), (300, 300), (32, 256)])
def test_packed_fp8_weights_are_the_sources_to_the_bit(block: tuple[int, int]) -> None:
    listed = _listed(LAYER, None) | {"gate_proj": [_fp8(gate, block) for gate in LAYER.gate]}
    wrapper = MoEWrapper(LAYER.config(2), backend="FP8", threads=2)
    wrapper.load_weights(listed)
    gate, up, down = (np.empty_like(m[0]) for m in (LAYER.gate, LAYER.up, LAYER.down))
    assert wrapper._packed is not None
    wrapper._packed.unpack_expert(1, gate.ctypes.data, up.ctypes.data, down.ctypes.data)
    for name, got in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        assert same_bits(got, listed[name][1].dequantize())


@pytest.mark.parametrize("backend", ["INT8", "BF16", "auto"])
def test_fp8_matrices_stay_fp8_whatever_format_the_backend_gives_floats(backend: str) -> None:
    wrapper = MoEWrapper(LAYER.config(2), backend=backend, threads=2)
    wrapper.load_weights(_listed(LAYER))
    assert wrapper.format == "FP8"
    assert same_bits(wrapper.forward(X, IDS, WEIGHTS), _output(_listed(LAYER)))


def test_a_bf16_checkpoint_quantised_to_fp8_loses_what_three_bits_of_mantissa_lose() -> None:
    y = _output(LAYER.weights())
    # 2.6 % in each of three matrices; the gate multiplies the errors of two.
    assert 0.03 <= relative_error(y, LAYER.reference(X, IDS, WEIGHTS)) <= 0.055


def test_realistic_outliers_cost_an_fp8_matrix_less_than_four_percent() -> None:
    """Input features, channels and single weights ten to a hundred times the rest."""
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((256, 512), np.float32) * np.exp(rng.standard_normal((256, 1), np.float32))
    weights[:, rng.permutation(512)[:5]] *= 20
    weights[rng.integers(0, 256, 40), rng.integers(0, 512, 40)] *= 100
    layer = Layer(weights[None], weights[None], np.ascontiguousarray(weights.T)[None])
    wrapper = MoEWrapper(layer.config(1), backend="FP8", threads=2)
    wrapper.load_weights(layer.weights())
    gate, up, down = np.empty_like(weights), np.empty_like(weights), np.empty_like(layer.down[0])
    assert wrapper._packed is not None
    wrapper._packed.unpack_expert(0, gate.ctypes.data, up.ctypes.data, down.ctypes.data)
    x = rng.standard_normal((64, 512)).astype(np.float32)
    for got, exact in ((gate, weights), (down, weights.T)):
        inputs = x[:, : exact.shape[1]]
        assert relative_error(inputs @ got.T, inputs.astype(np.float64) @ exact.T.astype(np.float64)) <= 0.04


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tokens_bits_do_not_depend_on_its_batch(backend: str) -> None:
    wrapper = MoEWrapper(LAYER.config(2), backend=backend, threads=2)
    wrapper.load_weights(_listed(LAYER))
    together = wrapper.forward(X, IDS, WEIGHTS)
    alone = np.concatenate([wrapper.forward(X[t : t + 1], IDS[t : t + 1], WEIGHTS[t : t + 1]) for t in range(len(X))])
    assert same_bits(together, alone)


def test_biases_come_beside_the_lists() -> None:
    rng = np.random.default_rng(2)
    biases = {
        "gate_proj_bias": rng.standard_normal((3, 200), np.float32),
        "down_proj_bias": rng.standard_normal((3, 300), np.float32),
    }
    listed = _listed(LAYER)
    floats = _dequantized(LAYER, listed).weights()
    exact, near = (
        _output(listed | biases),
        _output(floats | biases | {"up_proj_bias": np.zeros((3, 200), np.float32)}, "BF16"),
    )
    assert relative_error(exact, near.astype(np.float64)) <= 2 * ACTIVATIONS_ONLY


def test_converted_files_have_the_bits_of_loading_the_checkpoint(tmp_path: Path) -> None:
    tensors = {f"experts.{name}": torch.from_numpy(value) for name, value in LAYER.weights().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", tmp_path / "out", "fp8", threads=1)
    assert same_bits(_output(tmp_path / "out"), _output(LAYER.weights()))


def test_nan_codes_are_refused_with_expert_projection_and_place() -> None:
    listed = _listed(LAYER)
    listed["up_proj"][2].codes[17, 250] = 0xFF
    with pytest.raises(WeightsError, match="expert 2: up weight at channel 17, input 250 is NaN"):
        _output(listed)


@pytest.mark.parametrize("block", [(1, 128), (128, 64), (8, 128)])
def test_blocks_that_have_no_packed_form_are_refused_and_their_floats_run(block: tuple[int, int]) -> None:
    listed = _listed(LAYER, block)
    with pytest.raises(WeightsError, match=f"expert 0: gate: a scale for {block[0]} x {block[1]} .*pass their floats"):
        _output(listed)
    known = _dequantized(LAYER, listed)
    assert relative_error(_output(known.weights(), "BF16"), known.reference(X, IDS, WEIGHTS)) <= ACTIVATIONS_ONLY


def _without(name: str) -> dict[str, Any]:
    return {key: value for key, value in _listed(LAYER).items() if key != name}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (_without("up_proj"), "no up_proj"),
        (_listed(LAYER) | {"gate_up_proj": []}, "gate_up_proj beside"),
        (_listed(LAYER) | {"up_proj": _listed(LAYER)["up_proj"][:2]}, "each of the 3 experts, got 2"),
        (_listed(LAYER) | {"up_proj": LAYER.up}, "each of the 3 experts, got ndarray"),
        (_listed(LAYER) | {"gate_proj": _listed(LAYER)["down_proj"]}, r"codes of .* \(300, 200\); .* \(200, 300\)"),
        (_listed(LAYER) | {"down_proj": list(LAYER.down)}, "down_proj is ndarray, not an Fp8Matrix"),
        (_listed(LAYER) | {"up_proj": ["a", "b", "c"]}, "up_proj is str"),
        (_listed(LAYER) | {"up_proj_bias": np.zeros((3, 7))}, r"up_proj_bias has shape \(3, 7\)"),
    ],
)
def test_lists_that_are_not_the_layer_are_refused(weights: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        _output(weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": np.zeros((200, 300), np.int8)}, r"codes of expert 1, gate_proj are int8"),
        (
            {"scales": np.ones((2, 2), np.float32)},
            r"scales of expert 1, gate_proj are float32 \(2, 2\); .* float32 \(2, 3\)",
        ),
        ({"scales": np.ones((2, 3))}, "scales of expert 1, gate_proj are float64"),
        ({"block": (0, 128)}, "a scale for 0 x 128 weights"),
        ({"scales": np.full((2, 3), np.inf, np.float32)}, "gate scale of channel 0 from input 0 on is infinite"),
    ],
)
def test_fp8_matrices_that_are_none_are_refused(change: dict[str, Any], message: str) -> None:
    listed = _listed(LAYER)
    listed["gate_proj"][1] = replace(listed["gate_proj"][1], **change)
    with pytest.raises(WeightsError, match=message):
        _output(listed)


def test_a_failed_load_leaves_the_wrapper_as_it_was() -> None:
    listed, broken = _listed(LAYER), _listed(LAYER)
    broken["down_proj"][2].codes[0, 0] = 0x7F
    wrapper = MoEWrapper(LAYER.config(2), backend="FP8", threads=1)
    wrapper.load_weights(listed)
    before = wrapper.forward(X, IDS, WEIGHTS)
    with pytest.raises(WeightsError):
        wrapper.load_weights(broken)
    assert same_bits(wrapper.forward(X, IDS, WEIGHTS), before)
