"""`ExpertsSpec` reads sizes, layout and gate from any experts module, and explains what is none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV4Config, NemotronHConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from ktransformers.errors import UnsupportedModuleError
from ktransformers.experts import ExpertsSpec, GateFormula
from tests import models

SILU = GateFormula("silu")


def _make_experts(build: Callable[..., Any], **overrides: Any) -> Any:
    model = build(**overrides)
    return model.get_submodule(models.moe_layers(model)[-1])


@pytest.mark.parametrize(
    ("build", "sizes", "gate"),
    [
        (models.make_qwen3_moe, (8, 64, 64, 2), SILU),
        (models.make_qwen2_moe, (8, 64, 48, 2), SILU),
        (models.make_deepseek_v3, (8, 64, 48, 2), SILU),
        (models.make_mixtral, (4, 64, 96, 2), SILU),
        (models.make_olmoe, (8, 64, 96, 2), SILU),
        (models.make_granite_moe, (8, 64, 96, 2), SILU),
        (models.make_gpt_oss, (4, 64, 96, 2), GateFormula("silu", alpha=1.702, limit=7.0, up_offset=1.0)),
    ],
)
def test_families_are_read_alike_live_and_on_meta(
    build: Callable[..., Any], sizes: tuple[int, ...], gate: GateFormula
) -> None:
    module = _make_experts(build)
    spec = ExpertsSpec.from_module(module)
    assert (spec.num_experts, spec.hidden_dim, spec.intermediate_dim, spec.top_k) == sizes
    assert spec.gate == gate
    assert spec.notes == ()
    assert ExpertsSpec.from_module(copy.deepcopy(module).to("meta")) == spec


def test_nothing_keeps_gpt_oss_from_the_kernel() -> None:
    spec = ExpertsSpec.from_module(_make_experts(models.make_gpt_oss))
    assert spec.unsupported == ()
    assert (spec.is_transposed, spec.is_concatenated, spec.has_bias) == (True, False, True)


def test_layout_is_not_guessed_from_shapes_when_both_fit() -> None:
    # hidden = 2·intermediate: gate_up (E, H, 2I) is square, and a guess by shape would be a coin toss.
    spec = ExpertsSpec.from_module(_make_experts(models.make_gpt_oss, intermediate_size=32))
    assert (spec.hidden_dim, spec.intermediate_dim, spec.is_transposed) == (64, 32, True)


def test_a_clamp_in_the_configuration_reaches_the_formula() -> None:
    config = DeepseekV4Config(n_routed_experts=4, hidden_size=16, moe_intermediate_size=8, swiglu_limit=1.0)
    with torch.device("meta"):
        spec = ExpertsSpec.from_module(DeepseekV4Experts(config))
    assert spec.gate == GateFormula("silu", limit=1.0)


@pytest.mark.parametrize(("activation", "kernel"), [("gelu", "gelu"), ("relu2", "relu2"), ("gelu_new", "gelu_tanh")])
def test_another_activation_is_the_kernels_by_another_name(activation: str, kernel: str) -> None:
    spec = ExpertsSpec.from_module(_make_experts(models.make_qwen3_moe, hidden_act=activation))
    assert (spec.gate, spec.unsupported) == (GateFormula(kernel), ())


@pytest.mark.parametrize("activation", ["mish", "tanh", "relu6"])
def test_an_activation_the_kernel_lacks_is_refused_by_name(activation: str) -> None:
    spec = ExpertsSpec.from_module(_make_experts(models.make_qwen3_moe, hidden_act=activation))
    assert spec.gate is None
    assert spec.unsupported == (f"its gate computes none of the kernel's formulas (hidden_act is '{activation}')",)


def test_experts_without_a_gate_have_a_formula_of_up_alone() -> None:
    with torch.device("meta"):
        spec = ExpertsSpec.from_module(NemotronHExperts(NemotronHConfig()))
    assert (spec.gate, spec.unsupported) == (GateFormula("relu2", gated=False), ())


def test_experts_without_a_gate_whose_activation_is_unknown_are_refused_for_that() -> None:
    with torch.device("meta"):
        spec = ExpertsSpec.from_module(NemotronHExperts(NemotronHConfig(mlp_hidden_act="mish")))
    assert spec.unsupported == ("its activation computes none of the kernel's formulas (mlp_hidden_act is 'mish')",)


def test_the_expert_count_comes_from_tensors_and_the_configuration_is_contradicted_aloud() -> None:
    module = _make_experts(models.make_qwen3_moe)
    module.config.num_experts = 7
    spec = ExpertsSpec.from_module(module)
    assert spec.num_experts == 8
    (note,) = spec.notes
    assert note.startswith("the tensors have experts 8, the configuration says num_experts=7")


def test_a_post_expert_norm_is_seen_and_has_to_be_a_module() -> None:
    module = _make_experts(models.make_qwen3_moe)
    module.has_post_expert_norm = True
    with pytest.raises(UnsupportedModuleError, match="no module `post_expert_norm` says how"):
        ExpertsSpec.from_module(module)
    module.post_expert_norm = nn.RMSNorm(64)
    spec = ExpertsSpec.from_module(module)
    assert (spec.has_post_expert_norm, spec.unsupported) == (True, ())


def test_the_block_around_the_experts_is_explained() -> None:
    block = models.make_qwen3_moe().get_submodule("model.layers.1.mlp")
    with pytest.raises(UnsupportedModuleError, match=r"forward takes \(hidden_states\).*child `experts`"):
        ExpertsSpec.from_module(block)


def test_one_module_an_expert_is_the_older_layout() -> None:
    with pytest.raises(UnsupportedModuleError, match="module of its own"):
        ExpertsSpec.from_module(nn.ModuleList([nn.Linear(2, 2)]))


def test_quantised_weights_are_refused_with_their_type() -> None:
    module = _make_experts(models.make_qwen3_moe).to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedModuleError, match="float8_e4m3fn"):
        ExpertsSpec.from_module(module)


def test_projections_that_do_not_fit_each_other_are_refused_with_both_shapes() -> None:
    module = _make_experts(models.make_qwen3_moe)
    module.down_proj = nn.Parameter(torch.zeros(8, 64, 32))
    with pytest.raises(UnsupportedModuleError, match=r"\(8, 64, 32\).*\(8, 128, 64\)"):
        ExpertsSpec.from_module(module)


@pytest.mark.parametrize(
    ("name", "stranger", "told"),
    [
        ("bias", nn.Parameter(torch.zeros(64)), "holds bias, for which"),
        ("extra", nn.Linear(64, 64), r"holds extra\.bias, extra\.weight, for which"),
    ],
)
def test_weights_that_the_arithmetic_does_not_read_are_refused_by_name(name: str, stranger: Any, told: str) -> None:
    module = _make_experts(models.make_qwen3_moe)
    setattr(module, name, stranger)
    with pytest.raises(UnsupportedModuleError, match=told):
        ExpertsSpec.from_module(module)


def test_projections_of_two_dtypes_are_refused_with_the_remedy() -> None:
    module = _make_experts(models.make_qwen3_moe).to("meta")
    module.down_proj = nn.Parameter(module.down_proj.bfloat16())
    with pytest.raises(UnsupportedModuleError, match=r"is torch\.float32 and down_proj torch\.bfloat16: convert"):
        ExpertsSpec.from_module(module)
