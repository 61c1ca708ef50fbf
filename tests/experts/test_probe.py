"""A class outside transformers' interface is taken for what its own forward computes, or not at all."""

from __future__ import annotations

import dataclasses
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
from tests import models

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


@pytest.mark.parametrize("intermediate", [24, 12, 4])
def test_sizes_that_are_equal_stay_equal_when_cut_down(intermediate: int) -> None:
    def build(after: Change) -> Undecorated:
        module = Undecorated(after=after)
        module.down_proj = nn.Parameter(torch.zeros(4, 24, intermediate))
        module.gate_up_proj = nn.Parameter(torch.zeros(4, 2 * intermediate, 24))
        return module

    assert ExpertsSpec.from_module(build(_same)).intermediate_dim == intermediate
    with pytest.raises(UnsupportedModuleError, match="outside"):
        ExpertsSpec.from_module(build(lambda x: x * 1.01))


def _experts(build: Callable[[], Any] = models.make_qwen3_moe) -> Any:
    model = build()
    return model.get_submodule(models.moe_layers(model)[-1])


def _subclassed(module: Any, change: Change) -> Any:
    parent = type(module)

    class Changed(parent):  # type: ignore[misc,valid-type]
        def forward(this, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = change(super().forward(hidden, ids, weights))
            return out

    module.__class__ = Changed
    return module


FAMILIES = [models.make_qwen3_moe, models.make_gpt_oss, models.make_granite_moe]


@pytest.mark.parametrize("build", FAMILIES)
def test_a_subclass_that_computes_the_same_is_still_known(build: Callable[[], Any]) -> None:
    module = _experts(build)
    plain = ExpertsSpec.from_module(module)
    spec = ExpertsSpec.from_module(_subclassed(module, _same))
    assert dataclasses.replace(spec, class_name=plain.class_name) == plain
    assert ExpertsSpec.from_module(module.to("meta")) == spec


@pytest.mark.parametrize("build", FAMILIES)
def test_a_subclass_that_computes_something_else_is_refused(build: Callable[[], Any]) -> None:
    module = _subclassed(_experts(build), lambda x: x * 3)
    with pytest.raises(UnsupportedModuleError, match=r"forward of Changed is not transformers' own \(tests\."):
        ExpertsSpec.from_module(module)


def test_a_forward_set_on_the_module_itself_is_refused() -> None:
    module = _experts()
    module.forward = lambda hidden, *_: hidden
    with pytest.raises(UnsupportedModuleError, match="forward of this Qwen3MoeExperts was replaced"):
        ExpertsSpec.from_module(module)


def test_a_forward_that_accelerate_wrapped_is_looked_through() -> None:
    module = _experts()
    plain = ExpertsSpec.from_module(module)
    module._old_forward, module._hf_hook = module.forward, object()
    module.forward = lambda *args: module._old_forward(*args)
    assert ExpertsSpec.from_module(module) == plain


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
