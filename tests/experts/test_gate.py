"""The gate formula is found by computing it, never by a name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from ktransformers.experts import GateFormula, recognise_gate

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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
    assert recognise_gate(module, is_concatenated=True) == GateFormula("clamped_silu", limit=limit)


@settings(deadline=None, max_examples=40)
@given(
    alpha=st.floats(0.1, 5).map(lambda x: float(f"{x:.4g}")),
    limit=st.one_of(st.just(0.0), st.floats(0.01, 500).map(lambda x: float(f"{x:.4g}"))),
)
def test_gpt_oss_swiglu_gives_alpha_and_limit_away(alpha: float, limit: float) -> None:
    found = recognise_gate(_make_module(_swiglu(alpha, limit)), is_concatenated=True)
    assert found == GateFormula("swiglu_oai", alpha=alpha, limit=limit)


def test_constants_survive_a_gate_that_computes_in_float32() -> None:
    gate = _make_module(lambda g, u: _swiglu(1.702, 7.0)(g.float(), u.float()), is_concatenated=False)
    assert recognise_gate(gate, is_concatenated=False) == GateFormula("swiglu_oai", alpha=1.702, limit=7.0)


@pytest.mark.parametrize(
    "name", ["gelu", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu", "tanh", "mish", "sigmoid"]
)
def test_other_activations_are_not_taken_for_silu(name: str) -> None:
    activation = ACT2FN[name]
    assert recognise_gate(_make_module(lambda g, u: activation(g) * u), is_concatenated=True) is None


@pytest.mark.parametrize(
    "gate",
    [
        pytest.param(lambda g, u: functional.silu(g).clamp(max=7) * u.clamp(-7, 7), id="clamp after silu"),
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
