"""The gate formula is found by computing it, never by a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

import kt_kernel
from ktransformers.experts import GateFormula, recognise_gate

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# transformers' spelling → the kernel's.
_KERNEL_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def _make_module(gate: Gate, *, is_concatenated: bool = True) -> nn.Module:
    class Experts(nn.Module):
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            halves = gate_up.chunk(2, dim=-1) if is_concatenated else (gate_up[..., ::2], gate_up[..., 1::2])
            return gate(*halves)

    return Experts()


def _swiglu(alpha: float, limit: float) -> Gate:
    def gate(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        if limit:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return g * torch.sigmoid(alpha * g) * (u + 1)

    return gate


def test_plain_silu_is_recognised() -> None:
    assert recognise_gate(_make_module(lambda g, u: functional.silu(g) * u), is_concatenated=True) == GateFormula(
        "silu"
    )


@settings(deadline=None, max_examples=40)
@given(limit=st.floats(0.01, 500).map(lambda x: float(f"{x:.4g}")))
def test_clamp_before_silu_gives_its_limit_away(limit: float) -> None:
    module = _make_module(lambda g, u: functional.silu(g.clamp(max=limit)) * u.clamp(-limit, limit))
    assert recognise_gate(module, is_concatenated=True) == GateFormula("silu", limit=limit)


@settings(deadline=None, max_examples=40)
@given(
    alpha=st.floats(0.1, 5).map(lambda x: float(f"{x:.4g}")),
    limit=st.one_of(st.just(0.0), st.floats(0.01, 500).map(lambda x: float(f"{x:.4g}"))),
)
def test_gpt_oss_swiglu_gives_alpha_and_limit_away(alpha: float, limit: float) -> None:
    found = recognise_gate(_make_module(_swiglu(alpha, limit)), is_concatenated=True)
    assert found == GateFormula("silu", alpha=alpha, limit=limit, up_offset=1.0)


@settings(deadline=None, max_examples=40)
@given(
    limit=st.floats(0.01, 4).map(lambda x: float(f"{x:.4g}")),
    activation=st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2"]),
)
def test_clamp_after_the_activation_is_told_from_one_before_where_it_matters(limit: float, activation: str) -> None:
    act = ACT2FN[activation]
    after = recognise_gate(_make_module(lambda g, u: act(g).clamp(max=limit) * u.clamp(-limit, limit)))
    before = recognise_gate(_make_module(lambda g, u: act(g.clamp(max=limit)) * u.clamp(-limit, limit)))
    expected = GateFormula(_KERNEL_NAMES[activation], limit=limit)
    if activation == "relu" or (activation, limit) == ("relu2", 1.0):  # where the two are one
        assert after == before == expected
        return
    assert before == expected
    assert after == replace(expected, limit_after=True)


@settings(deadline=None, max_examples=40)
@given(
    offset=st.floats(-4, 4).filter(lambda x: abs(x) > 0.01).map(lambda x: float(f"{x:.3g}")),
    activation=st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2"]),
)
def test_an_offset_of_up_is_found(offset: float, activation: str) -> None:
    act = ACT2FN[activation]
    found = recognise_gate(_make_module(lambda g, u: act(g) * (u + offset)))
    assert found == GateFormula(_KERNEL_NAMES[activation], up_offset=offset)


def test_constants_survive_a_gate_that_computes_in_float32() -> None:
    gate = _make_module(lambda g, u: _swiglu(1.702, 7.0)(g.float(), u.float()), is_concatenated=False)
    assert recognise_gate(gate, is_concatenated=False) == GateFormula("silu", alpha=1.702, limit=7.0, up_offset=1.0)


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", list(_KERNEL_NAMES))
def test_activations_of_the_kernel_are_known_by_what_they_compute(
    name: str, dtype: torch.dtype, has_gate: bool
) -> None:
    activation = ACT2FN[name]
    module: Any = _make_module(lambda g, u: activation(g.to(dtype)) * u.to(dtype))
    module.act_fn = lambda x: activation(x.to(dtype))
    expected = GateFormula(_KERNEL_NAMES[name], gated=has_gate)
    assert recognise_gate(module, has_gate=has_gate) == expected


@pytest.mark.parametrize("has_gate", [True, False])
def test_quick_gelu_is_silu_with_an_alpha(has_gate: bool) -> None:
    module = _make_module(lambda g, u: ACT2FN["quick_gelu"](g) * u)
    module.act_fn = ACT2FN["quick_gelu"]
    assert recognise_gate(module, has_gate=has_gate) == GateFormula("silu", alpha=1.702, gated=has_gate)


_FOREIGN = sorted(set(ACT2FN) - set(_KERNEL_NAMES) - {"quick_gelu", "xielu"})  # xielu has parameters in bfloat16


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("name", _FOREIGN)
def test_no_other_activation_of_transformers_is_taken_for_one_of_the_kernels(name: str, has_gate: bool) -> None:
    activation = ACT2FN[name]
    module = _make_module(lambda g, u: activation(g) * u)
    module.act_fn = activation
    assert recognise_gate(module, has_gate=has_gate) is None


def test_experts_without_a_gate_or_an_activation_are_unknown() -> None:
    assert recognise_gate(nn.Module(), has_gate=False) is None


def test_the_formula_is_what_the_kernel_has() -> None:
    ours = {field.name: field.default for field in fields(GateFormula)}
    assert ours == {field.name: field.default for field in fields(kt_kernel.GateFormula)}
    for activation in set(_KERNEL_NAMES.values()):
        kt_kernel.GateFormula(**asdict(GateFormula(activation)))


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        (GateFormula(), "silu(g)·u"),
        (GateFormula(limit=7.0), "silu(g)·u, g ≤ 7, |u| ≤ 7"),
        (GateFormula(limit=7.0, limit_after=True), "silu(g)·u, silu(g) ≤ 7, |u| ≤ 7"),
        (GateFormula(alpha=1.702, limit=7.0, up_offset=1.0), "silu(g, alpha=1.702)·(u + 1), g ≤ 7, |u| ≤ 7"),
        (GateFormula("relu2", gated=False), "relu2(u)"),
    ],
)
def test_formulas_read_as_formulas(formula: GateFormula, text: str) -> None:
    assert str(formula) == text


@pytest.mark.parametrize(
    "gate",
    [
        pytest.param(lambda g, u: functional.silu(g).clamp(max=7) * u.clamp(-8, 8), id="two limits"),
        pytest.param(
            lambda g, u: functional.silu(g).clamp(-7, 7) * (u.clamp(-7, 7) + 1).clamp(max=7), id="third clamp"
        ),
        pytest.param(lambda g, u: functional.silu(g.clamp(max=7)) * u, id="only the gate clamped"),
        pytest.param(lambda g, u: functional.silu(g) * u.clamp(-7, 7), id="only up clamped"),
        pytest.param(lambda g, u: functional.silu(g) * torch.tanh(u / 30) * 30, id="soft cap"),
        pytest.param(lambda g, u: functional.silu(u) * g, id="halves swapped"),
        pytest.param(lambda g, u: functional.silu(g) * u * 1.001, id="scaled by a hair"),
        pytest.param(lambda g, u: functional.silu(g.flip(-1)) * u, id="neighbours mixed"),
        pytest.param(lambda g, u: functional.silu(g)[..., :1] * u[..., :1], id="another shape"),
        pytest.param(lambda g, u: g + u[..., :3], id="raises"),
    ],
)
def test_near_misses_are_unknown(gate: Gate) -> None:
    assert recognise_gate(_make_module(gate), is_concatenated=True) is None


def test_a_layout_flag_that_contradicts_the_gate_is_noticed() -> None:
    interleaved = _make_module(lambda g, u: functional.silu(g) * u, is_concatenated=False)
    assert recognise_gate(interleaved, is_concatenated=True) is None
    assert recognise_gate(interleaved, is_concatenated=False) == GateFormula("silu")
