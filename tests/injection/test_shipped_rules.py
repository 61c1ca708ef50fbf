"""The shipped rule files on the model families they are for, with the real operator and kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from ktransformers.errors import RuleMatchError
from ktransformers.injection import apply_plan, build_meta_model, make_plan
from ktransformers.operators.experts import KTransformersExperts
from ktransformers.rules import default_rules_for, find_rules, load_rules, shipped_rules
from tests.models import (
    make_deepseek_v3,
    make_gpt_oss,
    make_granite_moe,
    make_llama_dense,
    make_mixtral,
    make_olmoe,
    make_qwen2_moe,
    make_qwen3_moe,
    moe_layers,
)

_IDS = torch.arange(24)[None]
_FAMILIES = [make_qwen3_moe, make_qwen2_moe, make_mixtral, make_deepseek_v3, make_olmoe, make_granite_moe]

# As published; the file has to stay as it is, letter by letter.
_SERVE_AMX = r"""- match:
    name: "^model\\.layers\\..*\\.mlp\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs:
      prefill_device: "cuda"
      prefill_op: "KExpertsTorch"
      generate_device: "cpu"
      generate_op: "KExpertsCPU"
      out_device: "cuda"
      backend: "AMXINT8"  # Use "AMXBF16" for BF16 quantization
"""


def _relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got - wanted).norm() / wanted.norm()).item()


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(_IDS).logits


@pytest.mark.parametrize("make", _FAMILIES)
def test_the_default_file_of_a_family_replaces_all_its_experts_and_nothing_else(make: Any) -> None:
    model = make()
    model.set_experts_implementation("eager")
    before = _logits(model)
    report = apply_plan(make_plan(default_rules_for(model.config.model_type), model), model)
    assert [r.name for r in report.replacements] == moe_layers(model)
    assert report.unmatched_experts == ()
    assert {type(model.get_submodule(name)) for name in moe_layers(model)} == {KTransformersExperts}
    assert _relative_error(_logits(model), before) < 0.02
    report.undo()
    assert torch.equal(_logits(model), before)


@pytest.mark.parametrize("make", [*_FAMILIES, make_gpt_oss])
def test_the_generic_file_finds_the_experts_of_every_family(make: Any) -> None:
    model = make()
    assert [d.name for d in make_plan("moe", model).replacements] == moe_layers(model)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("model.layers.3.mlp.experts", True),
        ("model.language_model.layers.12.mlp.experts", True),
        ("language_model.model.layers.0.block_sparse_moe.experts", True),
        ("model.layers.7.feed_forward.experts", True),
        ("model.language_model.layers.7.mlp.text_moe.experts", True),
        ("backbone.layers.5.mixer.experts", True),
        ("model.layers.5.experts", True),
        ("layers.5.mlp.experts", True),
        ("model.layers.3.mlp.shared_experts", False),
        ("model.layers.3.mlp.shared_expert", False),
        ("model.layers.3.mlp.gate", False),
        ("model.layers.3.block_sparse_moe.router", False),
        ("model.layers.3.mlp.experts.act_fn", False),
        ("model.layers.3.mlp.experts.0", False),
        ("model.layers.3.mlp.experts.0.experts", False),
        ("model.layers.3.self_attn.experts_proj", False),
    ],
)
def test_the_generic_pattern(name: str, wanted: bool) -> None:
    (rule,) = load_rules("moe")
    assert rule.matches_name(name) is wanted


def test_the_published_serve_file_ships_letter_by_letter() -> None:
    assert find_rules("Qwen3MoE-serve-amx").read_text(encoding="utf-8") == _SERVE_AMX


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about hosts without CUDA")
def test_the_published_serve_file_runs_without_cuda_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = make_qwen3_moe()
    model.set_experts_implementation("eager")
    before = _logits(model)
    report = apply_plan(make_plan("Qwen3MoE-serve-amx.yaml", model), model, keep_float=False)
    assert {r.details["backend"] for r in report.replacements} == {"AMXINT8"}
    assert {r.details["format"] for r in report.replacements} == {"INT8"}
    assert _relative_error(_logits(model), before) < 0.05
    assert len([record for record in caplog.records if "cuda" in record.getMessage()]) == 1


@pytest.mark.parametrize("shipped", shipped_rules(), ids=lambda shipped: shipped.name)
def test_no_shipped_file_touches_a_dense_model(shipped: Any) -> None:
    said = "rule 1: matches no module" if shipped.name == "cpu-only" else "is a dense model"
    with pytest.raises(RuleMatchError, match=said):
        make_plan(shipped.path, make_llama_dense())


def test_the_linears_of_a_dense_model_go_to_the_kernel_when_dead_rules_are_allowed() -> None:
    model = make_llama_dense()
    before = _logits(model)
    plan = make_plan("cpu-only", model, allow_dead=True)
    assert len(plan.replacements) == 3 * 7 + 1
    apply_plan(plan, model)
    assert _relative_error(_logits(model), before) < 0.02


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_next",
        "glm4_moe",
        "phimoe",
        "ernie4_5_moe",
        "ernie4_5_vl_moe",
        "jamba",
        "granitemoeshared",
        "nemotron_h",
        "llama4_text",
    ],
)
def test_families_without_a_file_of_their_own_go_by_the_generic_one(model_type: str) -> None:
    model = build_meta_model(AutoConfig.for_model(model_type))
    plan = make_plan(default_rules_for(model_type), model)
    assert plan.replacements
    assert plan.unmatched_experts == ()


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("longcat_flash", "LongcatFlashExperts is outside transformers' experts interface"),
        ("jetmoe", "its experts are model.layers.N.self_attention.experts"),
    ],
)
def test_families_with_experts_of_their_own_kind_are_refused_with_the_reason(model_type: str, said: str) -> None:
    with pytest.raises(RuleMatchError) as caught:
        make_plan(default_rules_for(model_type), build_meta_model(AutoConfig.for_model(model_type)))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"generate_op": "KSFTExpertsCPU"}, "KSFTExpertsCPU is for fine-tuning"),
        ({"generate_op": "KExpertsCPU", "backend": "AMXINT9"}, "AMXINT9"),
        ({"generate_device": "cuda:1", "generate_op": "KExpertsCPU"}, "cuda:1"),
        ({"out_device": "cdua"}, "cdua"),
        ({"bakend": "INT8"}, "backend"),
    ],
)
def test_a_rule_for_another_op_backend_or_device_is_refused_with_its_line(
    tmp_path: Path, kwargs: dict[str, str], said: str
) -> None:
    path = tmp_path / "mine.yaml"
    lines = "\n".join(f"      {key}: '{value}'" for key, value in kwargs.items())
    path.write_text(
        "- match: {name: 'mlp\\.experts$'}\n  replace:\n    class: KTransformersExperts\n    kwargs:\n" + lines
    )
    with pytest.raises(RuleMatchError) as caught:
        make_plan(path, make_qwen3_moe())
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{path}:1: rule 1: ")


@pytest.mark.parametrize("name", [r"layers\.1\.mlp$", r"mlp\.gate$", r".*gate.*", "lm_head", r"layers\.1$"])
def test_the_experts_operator_refuses_whatever_is_not_experts(name: str) -> None:
    rule = {"match": {"name": name}, "replace": {"class": "KTransformersExperts"}}
    with pytest.raises(RuleMatchError, match="is no experts module"):
        make_plan([rule], make_qwen3_moe())


def test_float_tensors_really_go_when_packed() -> None:
    model = make_qwen3_moe()
    size = sum(p.nbytes for p in model.parameters())
    experts = sum(p.nbytes for n in moe_layers(model) for p in nn.Module.parameters(model.get_submodule(n)))
    apply_plan(make_plan("Qwen3MoE", model), model, keep_float=False)
    assert sum(p.nbytes for p in model.parameters() if not p.is_meta) == size - experts
