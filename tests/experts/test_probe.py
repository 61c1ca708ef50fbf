"""A class outside transformers' interface is taken for what its own forward computes, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import Llama4TextConfig, LongcatFlashConfig, Step3p7TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from ktransformers.errors import UnsupportedModuleError
from ktransformers.experts import ExpertsSpec, GateFormula

Change = Callable[[torch.Tensor], torch.Tensor]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


class Undecorated(nn.Module):
    """Ordinary experts of 4 × (24 → 10), with something else done on the way in or out."""

    def __init__(self, before: Change = _same, after: Change = _same, *, transposed: bool = False) -> None:
        super().__init__()
        self.num_experts, self.hidden_dim = 4, 24
        self.act_fn = nn.SiLU()
        self.before, self.after, self.transposed = before, after, transposed
        first, down = torch.randn(4, 20, 24) / 5, torch.randn(4, 24, 10) / 3
        if transposed:
            first, down = first.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
        self.gate_up_proj, self.down_proj = nn.Parameter(first), nn.Parameter(down)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x.view(-1, self.hidden_dim))
        for expert in range(self.num_experts):
            first, down = self.gate_up_proj[expert], self.down_proj[expert]
            if self.transposed:
                first, down = first.t(), down.t()
            token, slot = torch.where(ids == expert)
            gate, up = functional.linear(self.before(x[token]), first).chunk(2, dim=-1)
            each = functional.linear(self.act_fn(gate) * up, down)
            out.index_add_(0, token, self.after(each) * weights[token, slot, None])
        return out


@pytest.mark.parametrize("transposed", [False, True])
def test_ordinary_arithmetic_without_the_interface_is_recognised(transposed: bool) -> None:
    module = Undecorated(transposed=transposed)
    spec = ExpertsSpec.from_module(module)
    assert (spec.num_experts, spec.hidden_dim, spec.intermediate_dim) == (4, 24, 10)
    assert (spec.is_transposed, spec.is_concatenated, spec.is_presorted) == (transposed, True, False)
    assert (spec.gate, spec.unsupported) == (GateFormula(), ())
    assert ExpertsSpec.from_module(module.to("meta")) == spec
    assert module.num_experts == 4


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"after": lambda x: x * 1.01}, id="scaled"),
        pytest.param({"after": lambda x: x.clamp(-60, 60)}, id="output clamped"),
        pytest.param({"before": lambda x: functional.rms_norm(x, x.shape[-1:])}, id="input normalised"),
        pytest.param({"after": lambda x: x + 1e-3}, id="biased"),
        pytest.param({"before": lambda x: x[..., :5]}, id="fails on tiny tensors"),
    ],
)
def test_anything_else_on_the_way_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModuleError, match="Undecorated is outside transformers' experts interface"):
        ExpertsSpec.from_module(Undecorated(**changes))


def test_sizes_that_cannot_be_told_apart_are_refused() -> None:
    module = Undecorated()
    module.down_proj = nn.Parameter(torch.zeros(4, 24, 24))
    module.gate_up_proj = nn.Parameter(torch.zeros(4, 48, 24))
    with pytest.raises(UnsupportedModuleError, match="outside"):
        ExpertsSpec.from_module(module)


def test_llama4_experts_take_sorted_rows_and_no_ids() -> None:
    with torch.device("meta"):
        module = Llama4TextExperts(Llama4TextConfig(num_local_experts=3, hidden_size=32, intermediate_size=20))
    spec = ExpertsSpec.from_module(module)
    assert (spec.num_experts, spec.hidden_dim, spec.intermediate_dim) == (3, 32, 20)
    assert (spec.is_transposed, spec.is_presorted, spec.gate) == (True, True, GateFormula())


@pytest.mark.parametrize("limit", [None, 7.0])
def test_step_clamps_after_the_activation_where_its_layer_says_so(limit: float | None) -> None:
    config = Step3p7TextConfig(num_local_experts=3, hidden_size=32, moe_intermediate_size=20)
    with torch.device("meta"):
        spec = ExpertsSpec.from_module(Step3p7Experts(config, swiglu_limit=limit))
    expected = GateFormula(limit=7.0, limit_after=True) if limit else GateFormula()
    assert (spec.gate, spec.unsupported) == (expected, ())


def test_longcats_identity_experts_are_refused() -> None:
    config = LongcatFlashConfig(n_routed_experts=4, hidden_size=32, expert_ffn_hidden_size=20, zero_expert_num=2)
    with torch.device("meta"), pytest.raises(UnsupportedModuleError, match="LongcatFlashExperts is outside"):
        ExpertsSpec.from_module(LongcatFlashExperts(config))
