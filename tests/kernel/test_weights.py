"""Weights given as a dictionary of arrays."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
import torch

from kt_kernel import MoEWrapper, NotLoadedError, WeightsError
from kt_kernel.weights import ExpertWeights
from tests.kernel.layers import FORMATS, make_input, make_layer, same_bits

LAYER = make_layer(5, 24, 16)
X, IDS, WEIGHTS = make_input(LAYER, 4, 2)
GOOD = LAYER.weights()


def _make_wrapper(**options: Any) -> MoEWrapper:
    return MoEWrapper(LAYER.config(2), backend="INT8", threads=1, **options)


def _output(weights: Any, **options: Any) -> Any:
    wrapper = _make_wrapper(**options)
    wrapper.load_weights(weights)
    return wrapper.forward(X, IDS, WEIGHTS)


def test_fused_gate_and_up_are_the_same_weights() -> None:
    fused = {"gate_up_proj": np.concatenate([LAYER.gate, LAYER.up], axis=1), "down_proj": LAYER.down}
    assert same_bits(_output(fused), _output(GOOD))


def test_torch_parameters_are_the_same_weights() -> None:
    tensors = {name: torch.nn.Parameter(torch.from_numpy(value)) for name, value in GOOD.items()}
    assert same_bits(_output(tensors), _output(GOOD))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_weights_are_packed_as_the_numbers_they_are(dtype: torch.dtype) -> None:
    half = {name: torch.from_numpy(value).to(dtype) for name, value in GOOD.items()}
    full = {name: value.float() for name, value in half.items()}
    assert same_bits(_output(half), _output(full))


def test_transposed_interleaved_and_reversed_weights_need_no_particular_strides() -> None:
    transposed = {name: np.ascontiguousarray(value.swapaxes(1, 2)).swapaxes(1, 2) for name, value in GOOD.items()}
    assert same_bits(_output(transposed), _output(GOOD))
    both = np.empty((5, 32, 24), np.float32)
    both[:, ::2], both[:, 1::2] = LAYER.gate, LAYER.up
    interleaved = {"gate_proj": both[:, ::2], "up_proj": both[:, 1::2], "down_proj": LAYER.down}
    assert same_bits(_output(interleaved), _output(GOOD))
    back_to_front = {name: value[::-1, ::-1].copy()[::-1, ::-1] for name, value in GOOD.items()}
    assert same_bits(_output(back_to_front), _output(GOOD))


def test_one_array_for_each_expert_in_a_state_dict_with_a_prefix() -> None:
    named = {
        f"model.layers.3.mlp.experts.{e}.{name}.weight": value[e] for name, value in GOOD.items() for e in range(5)
    }
    assert same_bits(_output(named), _output(GOOD))


@pytest.mark.parametrize("name", list(GOOD))
def test_a_missing_projection_is_named(name: str) -> None:
    with pytest.raises(WeightsError, match=f"1 of 3 tensors are missing: {name}"):
        _output({key: value for key, value in GOOD.items() if key != name})


def test_a_superfluous_tensor_is_named_and_not_dropped() -> None:
    with pytest.raises(WeightsError, match="would drop: 'gate_proj_scale'"):
        _output({**GOOD, "gate_proj_scale": np.zeros((5, 16), np.float32)})


def test_both_forms_at_once_are_refused() -> None:
    with pytest.raises(WeightsError, match="gate_up_proj and also gate_proj, up_proj"):
        _output({**GOOD, "gate_up_proj": np.concatenate([LAYER.gate, LAYER.up], axis=1)})


def test_two_names_of_one_projection_are_refused() -> None:
    with pytest.raises(WeightsError, match="gate_proj and w1 are the same projection"):
        _output({**GOOD, "w1": LAYER.gate})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gate_proj", LAYER.gate[:, :15], r"gate_proj .*shape \(5, 15, 24\); the config makes it \(5, 16, 24\)"),
        ("up_proj", LAYER.up[:4], r"up_proj .*shape \(4, 16, 24\); the config makes it \(5, 16, 24\)"),
        ("down_proj", LAYER.down[0], r"down_proj .*shape \(24, 16\); the config makes it \(5, 24, 16\)"),
        ("down_proj", LAYER.down.swapaxes(1, 2), "two dimensions are swapped: pass the transposed view"),
        ("down_proj", LAYER.down.astype(np.float64), "down_proj is float64"),
        ("down_proj", LAYER.down.astype(np.int8), "down_proj is int8"),
        ("down_proj", LAYER.down.tolist(), "down_proj has to be a torch tensor or a numpy array, got list"),
        ("down_proj", torch.from_numpy(LAYER.down).to("meta"), "down_proj is on the meta device"),
        ("down_proj", LAYER.down.astype(np.float16), "projections have to be of one dtype"),
    ],
)
def test_a_wrong_tensor_is_refused_with_both_shapes_or_dtypes(name: str, value: Any, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        _output({**GOOD, name: value})


@pytest.mark.parametrize("weights", [None, 5, [LAYER.gate], LAYER.gate])
def test_something_else_than_a_dictionary_or_path_is_refused(weights: Any) -> None:
    with pytest.raises(WeightsError, match="weights are a dictionary of arrays or a path, not"):
        _output(weights)


def test_an_empty_dictionary_says_what_was_looked_for() -> None:
    with pytest.raises(
        WeightsError, match=r"no experts in the weights dictionary: looked for gate_proj.*found nothing"
    ):
        _output({})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", list(GOOD))
@pytest.mark.parametrize("backend", FORMATS)
def test_a_weight_that_is_not_finite_is_found_while_packing_with_expert_and_projection(
    backend: str, name: str, value: float
) -> None:
    spoilt = GOOD[name].copy()
    spoilt[3, 7, 11] = value
    wrapper = MoEWrapper(LAYER.config(2), backend=backend, threads=2)
    with pytest.raises(WeightsError, match=f"expert 3.*{name.removesuffix('_proj')}"):
        wrapper.load_weights({**GOOD, name: spoilt})


def test_forward_before_load_says_what_to_do() -> None:
    wrapper = _make_wrapper()
    for call in (wrapper.warm_up, lambda: wrapper.forward(X, IDS, WEIGHTS), lambda: wrapper.submit(X, IDS, WEIGHTS)):
        with pytest.raises(NotLoadedError, match="MoEWrapper has no weights yet: call load_weights"):
            call()
    assert (wrapper.loaded, wrapper.nbytes, wrapper.bytes_per_token) == (False, 0, 0)


def test_a_failed_load_leaves_the_wrapper_as_it_was() -> None:
    wrapper = _make_wrapper()
    wrapper.load_weights(GOOD)
    before, size = wrapper.forward(X, IDS, WEIGHTS), wrapper.nbytes
    spoilt = LAYER.down.copy()
    spoilt[4, 0, 0] = np.nan
    with pytest.raises(WeightsError):
        wrapper.load_weights({**GOOD, "down_proj": spoilt})
    assert same_bits(wrapper.forward(X, IDS, WEIGHTS), before)
    assert wrapper.nbytes == size


def test_loading_again_replaces_the_weights() -> None:
    wrapper = _make_wrapper()
    wrapper.load_weights(GOOD)
    first = wrapper.forward(X, IDS, WEIGHTS)
    other = make_layer(5, 24, 16, seed=1)
    wrapper.load_weights(other.weights())
    assert not same_bits(wrapper.forward(X, IDS, WEIGHTS), first)
    assert same_bits(wrapper.forward(X, IDS, WEIGHTS), _output(other.weights()))


def test_ctrl_c_is_heard_between_two_experts_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = _make_wrapper()
    wrapper.load_weights(GOOD)
    before = wrapper.forward(X, IDS, WEIGHTS)
    packed: list[int] = []
    read = ExpertWeights.expert

    def interrupted(self: ExpertWeights, index: int) -> Any:
        packed.append(index)
        if index == 2:
            signal.raise_signal(signal.SIGINT)
        return read(self, index)

    monkeypatch.setattr(ExpertWeights, "expert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        wrapper.load_weights(make_layer(5, 24, 16, seed=1).weights())
    assert packed == [0, 1, 2]
    assert same_bits(wrapper.forward(X, IDS, WEIGHTS), before)


def test_packing_without_the_memory_for_it_names_the_layer_and_the_bytes() -> None:
    experts, size = 2**14, 2**16  # 192 TiB, more than a process can address, of arrays that hold one number
    names = ("gate_proj", "up_proj", "down_proj")
    weights = {f"layers.7.experts.{name}": np.broadcast_to(np.float32(0), (experts, size, size)) for name in names}
    config = {**LAYER.config(2), "expert_num": experts, "hidden_size": size, "intermediate_size": size}
    wrapper = MoEWrapper(config, backend="INT8", threads=1)
    told = rf"layers\.7\.experts: no memory .*INT8 weights, {3 * experts * size * size} bytes"
    with pytest.raises(MemoryError, match=told):
        wrapper.load_weights(weights)
    assert not wrapper.loaded
