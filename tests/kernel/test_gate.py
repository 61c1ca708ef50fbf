"""Gate formulas, biases and experts without a gate, through the wrapper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from kt_kernel import ConfigError, GateFormula, MoEWrapper, WeightsError
from tests.kernel.layers import BOUND, FORMATS, make_input, make_layer, relative_error, same_bits

LAYER = make_layer(4, 72, 40)
LAYER = replace(LAYER, gate=LAYER.gate * 2, up=LAYER.up * 2)
X, IDS, WEIGHTS = make_input(LAYER, 9, 2)
UNGATED = GateFormula("relu2", gated=False)

_rng = np.random.default_rng(3)
BIASES = {
    name: _rng.standard_normal((4, size)).astype(np.float32)
    for name, size in (("gate_proj_bias", 40), ("up_proj_bias", 40), ("down_proj_bias", 72))
}

ACTIVATIONS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "silu": lambda x, alpha: x * torch.sigmoid(alpha * x),
    "gelu": lambda x, _: functional.gelu(x),
    "gelu_tanh": lambda x, _: functional.gelu(x, approximate="tanh"),
    "relu": lambda x, _: functional.relu(x),
    "relu2": lambda x, _: functional.relu(x).square(),
}
FORMULAS = [
    *(GateFormula(name, gated=gated) for name in ACTIVATIONS for gated in (True, False)),
    GateFormula("silu", limit=0.7),
    GateFormula("silu", alpha=1.702, limit=1.1, up_offset=1.0),
    GateFormula("silu", limit=0.5, limit_after=True),
    GateFormula("gelu_tanh", limit=0.9, limit_after=True, up_offset=-0.5),
]


def _reference(gate: GateFormula, biases: dict[str, Any]) -> Any:
    def project(rows: torch.Tensor, matrix: Any, name: str, expert: int) -> torch.Tensor:
        bias = torch.from_numpy(biases[name][expert]).double() if name in biases else None
        return functional.linear(rows, torch.from_numpy(matrix[expert]).double(), bias)

    x, out = torch.from_numpy(X).double(), torch.zeros(X.shape, dtype=torch.float64)
    for token, slot in np.ndindex(IDS.shape):
        e = int(IDS[token, slot])
        u = project(x[token], LAYER.up, "up_proj_bias", e)
        if gate.gated:
            g = project(x[token], LAYER.gate, "gate_proj_bias", e)
            if gate.limit:
                g, u = (g if gate.limit_after else g.clamp(max=gate.limit)), u.clamp(-gate.limit, gate.limit)
            a = ACTIVATIONS[gate.activation](g, gate.alpha)
            inner = (a.clamp(max=gate.limit) if gate.limit_after else a) * (u + gate.up_offset)
        else:
            inner = ACTIVATIONS[gate.activation](u, gate.alpha)
        out[token] += float(WEIGHTS[token, slot]) * project(inner, LAYER.down, "down_proj_bias", e)
    return out.numpy()


def _make_wrapper(gate: GateFormula | None = None, backend: str = "INT8", **config: float) -> MoEWrapper:
    return MoEWrapper({**LAYER.config(2), **config}, backend=backend, threads=1, gate=gate)


def _output(weights: Any, gate: GateFormula | None = None, backend: str = "INT8") -> Any:
    wrapper = _make_wrapper(gate, backend)
    wrapper.load_weights(weights)
    return wrapper.forward(X, IDS, WEIGHTS)


def _weights(gate: GateFormula, *, biased: bool) -> dict[str, Any]:
    named = {**LAYER.weights(), **(BIASES if biased else {})}
    return {name: value for name, value in named.items() if gate.gated or not name.startswith("gate")}


@pytest.mark.parametrize("backend", FORMATS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gate", FORMULAS, ids=str)
def test_every_formula_with_and_without_biases(gate: GateFormula, biased: bool, backend: str) -> None:
    weights = _weights(gate, biased=biased)
    assert relative_error(_output(weights, gate, backend), _reference(gate, weights)) < 1.3 * BOUND[backend]


def test_the_configs_swiglu_is_the_formula_it_stands_for() -> None:
    by_config = _make_wrapper(swiglu_alpha=1.702, swiglu_limit=1.1)
    by_config.load_weights(LAYER.weights())
    gate = GateFormula(alpha=1.702, limit=1.1, up_offset=1.0)
    assert by_config.gate == gate
    assert same_bits(by_config.forward(X, IDS, WEIGHTS), _output(LAYER.weights(), gate))


def test_a_formula_in_both_places_is_refused() -> None:
    with pytest.raises(ConfigError, match="swiglu_limit=7 in the config: say it in one of the two places"):
        _make_wrapper(GateFormula(), swiglu_limit=7.0)


def test_a_formula_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gate is 'silu', a str; pass a kt_kernel.GateFormula"):
        _make_wrapper("silu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation": "gelu_tan"}, "unknown activation 'gelu_tan'; did you mean 'gelu_tanh'"),
        ({"activation": "gelu", "alpha": 1.7}, "alpha is 1.7, which only silu has, not gelu"),
        ({"alpha": 0.0}, "alpha is 0.0; it has to be above 0"),
        ({"limit": float("nan")}, "limit is nan; it has to be a finite number"),
        ({"limit": -1.0}, "limit is -1.0; it has to be 0"),
        ({"limit_after": True}, "limit_after without a limit"),
        ({"gated": 1}, "gated is 1; it has to be True or False"),
        ({"gated": False, "up_offset": 1.0}, "belong to a gate; there is none"),
    ],
)
def test_what_the_kernel_does_not_compute_is_no_formula(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GateFormula(**fields)


def test_fused_biases_go_with_fused_weights() -> None:
    fused = {
        "gate_up_proj": np.concatenate([LAYER.gate, LAYER.up], axis=1),
        "down_proj": LAYER.down,
        "gate_up_proj_bias": np.concatenate([BIASES["gate_proj_bias"], BIASES["up_proj_bias"]], axis=1),
        "down_proj_bias": BIASES["down_proj_bias"],
    }
    assert same_bits(_output(fused), _output({**LAYER.weights(), **BIASES}))


def test_biases_of_another_dtype_and_any_strides_are_the_numbers_they_are() -> None:
    half = {name: torch.from_numpy(value).bfloat16() for name, value in BIASES.items()}
    full = {name: value.float().numpy() for name, value in half.items()}
    wanted = _output({**LAYER.weights(), **full})
    assert same_bits(_output({**LAYER.weights(), **half}), wanted)
    spread = {name: np.repeat(value, 2, axis=1)[:, ::2] for name, value in full.items()}
    assert same_bits(_output({**LAYER.weights(), **spread}), wanted)


def test_a_projection_without_biases_beside_one_that_has_them_adds_nothing() -> None:
    zeros = {name: value if name == "down_proj_bias" else np.zeros_like(value) for name, value in BIASES.items()}
    alone = {"down_proj_bias": BIASES["down_proj_bias"]}
    assert same_bits(_output({**LAYER.weights(), **alone}), _output({**LAYER.weights(), **zeros}))


def test_a_checkpoint_with_one_bias_for_each_expert(tmp_path: Path) -> None:
    named = {**LAYER.weights(), **BIASES}
    tensors = {
        f"model.layers.0.mlp.experts.{e}.{name.removesuffix('_bias')}.{'bias' if 'bias' in name else 'weight'}": value
        for name, stacked in named.items()
        for e, value in enumerate(torch.from_numpy(stacked).unbind())
    }
    file = tmp_path / "model.safetensors"
    save_file({name: value.clone() for name, value in tensors.items()}, file)
    assert same_bits(_output(file), _output(named))
    del tensors["model.layers.0.mlp.experts.3.up_proj.bias"]
    with pytest.raises(WeightsError, match=r"1 of 12 tensors are missing: 3\.up_proj_bias"):
        _output(tensors)


@pytest.mark.parametrize(
    ("changes", "gate", "message"),
    [
        ({}, UNGATED, r"gate_proj for experts without a gate \(gated=False\)"),
        ({"gate_proj": None}, None, "gate_proj; experts without a gate are loaded with gate=GateFormula"),
        ({"gate_proj": None, **BIASES}, UNGATED, "gate_proj_bias beside the weights down_proj, up_proj"),
        (
            {"gate_up_proj_bias": np.zeros((4, 80), np.float32)},
            None,
            "gate_up_proj_bias beside the weights down_proj, gate_proj, up_proj: biases come in the form",
        ),
        ({"up_proj_bias": BIASES["up_proj_bias"][:, :39]}, None, r"up_proj_bias .*\(4, 39\).*makes it \(4, 40\)"),
        ({"up_proj_bias": BIASES["up_proj_bias"][0]}, None, r"up_proj_bias .*\(40,\).*makes it \(4, 40\)"),
        ({"up_proj_bias": BIASES["up_proj_bias"].astype(np.float64)}, None, "up_proj_bias is float64"),
    ],
)
def test_weights_that_do_not_go_with_the_formula_or_each_other(
    changes: dict[str, Any], gate: GateFormula | None, message: str
) -> None:
    weights = {name: value for name, value in {**LAYER.weights(), **changes}.items() if value is not None}
    with pytest.raises(WeightsError, match=message):
        _output(weights, gate)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", list(BIASES))
def test_a_bias_that_is_not_finite_is_named(name: str, value: float) -> None:
    spoilt = BIASES[name].copy()
    spoilt[2, 17] = value
    with pytest.raises(WeightsError, match=f"expert 2: {name.removesuffix('_proj_bias')} bias of channel 17 is"):
        _output({**LAYER.weights(), **BIASES, name: spoilt})


def test_experts_without_a_gate_take_a_third_less_memory() -> None:
    gated, ungated = _make_wrapper(), _make_wrapper(UNGATED)
    gated.load_weights(LAYER.weights())
    ungated.load_weights(_weights(UNGATED, biased=False))
    assert ungated.nbytes < 0.8 * gated.nbytes
