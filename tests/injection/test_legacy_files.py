"""Every rule file of upstream's archive, as it was written, on a small model of the family it is for."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import ktransformers
from ktransformers.errors import RuleMatchError
from ktransformers.injection import make_plan
from ktransformers.operators.experts import KTransformersExperts
from ktransformers.operators.linear import KTransformersLinear
from tests import models
from tests.injection.legacy_files import FILES, LAYERS, legacy_text

_MAKE: dict[str, Any] = {
    "deepseek_v2": models.make_deepseek_v2,
    "deepseek_v3": models.make_deepseek_v3,
    "glm4_moe": models.make_glm4_moe,
    "granitemoe": models.make_granite_moe,
    "llama": models.make_llama_dense,
    "mixtral": models.make_mixtral,
    "qwen2_moe": models.make_qwen2_moe,
    "qwen3_moe": models.make_qwen3_moe,
    "qwen3_next": models.make_qwen3_next,
}
# The backend that a file's experts run on; all others are written without one.
_BACKENDS = {
    "DeepSeek-V3-Chat-amx": "AMXINT8",
    "Qwen2-serve-amx": "AMXINT8",
    "Qwen3Moe-serve-amx": "AMXBF16",
    "npu/DeepSeek-V3-Chat-300IA2-npu": "INT8",
    "npu/DeepSeek-V3-Chat-300IA2-npu-serve": "INT8",
}
# Files that put linears on the CPU kernel: what they come down to.
_LINEARS = {
    "DeepSeek-V2-Lite-Chat-gpu-cpu": [(r"layers\.[4-7]\.(?!self_attn)", "auto")],
    "rocm/DeepSeek-V3-Chat": [("^lm_head$", "auto"), (r"layers\.(?!.*kv_b_proj)", "INT8")],
}
# The only file without a rule for experts: upstream's block for the NPU held them.
_NO_EXPERTS = ("npu/Qwen3-Chat-300IA2-npu-serve", "Internlm2_5-7b-Chat-1m")
# How many rules decide nothing. Some did not in upstream either; those for rotary embeddings of single layers do not
# since transformers has one for all; layer 0 of the small models, a whole stage of eight, is dense; and transformers
# has no SmallThinker.
_DEAD = {
    "DeepSeek-V2-Chat-multi-gpu-4": 4,
    "DeepSeek-V2-Chat-multi-gpu": 2,
    "DeepSeek-V2-Lite-Chat-gpu-cpu": 4,
    "DeepSeek-V2-Lite-Chat-multi-gpu": 2,
    "DeepSeek-V3-Chat-multi-gpu-4": 4,
    "DeepSeek-V3-Chat-multi-gpu-8": 11,
    "DeepSeek-V3-Chat-multi-gpu-fp8-linear-ggml-experts": 2,
    "DeepSeek-V3-Chat-multi-gpu-marlin": 2,
    "DeepSeek-V3-Chat-multi-gpu": 2,
    "Qwen2-57B-A14B-Instruct-multi-gpu": 4,
    "Smallthinker-serve": 4,
    "npu/DeepSeek-V3-Chat-300IA2-npu-serve": 1,
    "npu/DeepSeek-V3-Chat-300IA2-npu": 1,
    "npu/Qwen3-Chat-300IA2-npu-serve": 1,
}
_IDS = torch.arange(3, 27)[None]

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or torch.xpu.is_available(), reason="is about hosts without the devices the files name"
)


@cache
def _model(family: str) -> Any:
    """One for all tests: each takes its injection back."""
    layers = {} if family == "qwen3_next" else {"num_hidden_layers": LAYERS}
    model = _MAKE[family](**layers)
    if family != "llama":
        model.set_experts_implementation("eager")
    return model


def _logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=_IDS, use_cache=False).logits
    return logits


@cache
def _plain(family: str, backend: str, linears: tuple[tuple[str, str], ...]) -> torch.Tensor:
    """Logits of the family with its experts, and the linears given, injected by rules of today."""
    model = _model(family)
    rules = [{"match": {"name": r"\.experts$"}, "replace": {"class": "KTransformersExperts"}}] if backend else []
    rules += [
        {"match": {"name": name, "class": "torch.nn.Linear"}, "replace": {"class": "KTransformersLinear"}}
        for name, _ in linears
    ]
    for rule, chosen in zip(rules, [backend, *(b for _, b in linears)][-len(rules) :] if rules else [], strict=True):
        rule["replace"]["kwargs"] = {"backend": chosen}
    report = ktransformers.inject(model, rules) if rules else None
    logits = _logits(model)
    if report is not None:
        report.undo()
    return logits


def test_the_files_have_as_many_rules_as_upstreams() -> None:
    assert {name: len(make()) for name, (_, _, make) in FILES.items()} == {
        n: count for n, (count, _, _) in FILES.items()
    }
    assert (len(FILES), sum(count for count, _, _ in FILES.values())) == (38, 495)


@pytest.mark.parametrize("name", FILES)
def test_a_file_runs_unchanged_with_the_numbers_of_the_plain_injection(name: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(legacy_text(name))
    family = FILES[name][1]
    model = _model(family)
    report = ktransformers.inject(model, path, legacy=True)
    experts = [] if name in _NO_EXPERTS else models.moe_layers(model)
    assert [r.name for r in report.replacements if r.new_class == "KTransformersExperts"] == experts
    assert {type(model.get_submodule(n)) for n in experts} <= {KTransformersExperts}
    linears = tuple(_LINEARS.get(name, ()))
    kernel = [
        m for m in model.modules() if isinstance(m, KTransformersLinear) and m.options.generate_op == "KLinearCPU"
    ]
    assert bool(kernel) == bool(linears)
    backend = _BACKENDS.get(name, "auto") if experts else ""
    logits = _logits(model)
    report.undo()
    assert torch.equal(logits, _plain(family, backend, linears))


@pytest.mark.parametrize("name", FILES)
def test_rules_that_decide_nothing_are_errors_with_the_way_out_and_warnings_in_legacy(name: str) -> None:
    rules = FILES[name][2]()
    model = _model(FILES[name][1])
    plan = make_plan(rules, model, allow_dead=True)
    assert len(plan.warnings) == _DEAD.get(name, 0), plan.warnings
    if plan.warnings:
        with pytest.raises(RuleMatchError, match="legacy=True, or --legacy, makes it a warning") as caught:
            make_plan(rules, model)
        assert len(caught.value.problems) == len(plan.warnings)
    else:
        assert make_plan(rules, model).decisions == plan.decisions


def test_each_kind_of_operator_that_is_gone_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    make_plan(FILES["DeepSeek-V3-Chat-multi-gpu-8"][2](), _model("deepseek_v3"), allow_dead=True)
    lines = [record.getMessage() for record in caplog.records]
    kinds = [line.split(": ")[2] for line in lines if "upstream's rule files are not in this package" in line]
    assert [kind.split(" of upstream")[0] for kind in kinds] == [
        "rotary embeddings",
        "Marlin linears",
        "MoE blocks",
        "routers",
        "attention modules",
        "model wrappers",
    ]
    assert lines[0].startswith("<python>: rule 2: rotary embeddings of upstream's rule files are not in this package")
    assert [line for line in lines if "cuda was asked for" in line] == lines[len(kinds) :]  # one, for eight devices


def test_an_op_that_is_not_here_is_refused_where_the_rule_is_strict() -> None:
    for of, kwargs in (("Experts", {"generate_op": "KExpertsMarlin"}), ("Linear", {"generate_op": "KLinearMarlin"})):
        name = r"\.experts$" if of == "Experts" else "^lm_head$"
        rule = {
            "match": {"name": name},
            "replace": {"class": f"KTransformers{of}", "kwargs": {**kwargs, "strict": True}},
        }
        with pytest.raises(RuleMatchError, match=f"{kwargs['generate_op']} needs a .*kernel"):
            make_plan([rule], _model("qwen3_moe"))
        rule["replace"]["kwargs"].pop("strict")
        make_plan([rule], _model("qwen3_moe"))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("ktransformers.models.modeling_qwen4.Qwen4MLP", "upstream had no model `ktransformers.models.modeling_qwen4`"),
        ("ktransformers.models.modeling_mixtral.MixtralMLP2", "stands for no class of transformers' mixtral"),
    ],
)
def test_a_vendored_class_that_upstream_did_not_have_is_refused(path: str, said: str) -> None:
    rule = {"match": {"class": path}, "replace": {"class": "default"}}
    with pytest.raises(RuleMatchError) as caught:
        make_plan([rule], _model("qwen3_moe"))
    assert said in str(caught.value)


def test_old_and_new_names_of_mixtrals_block_both_find_it() -> None:
    model = _model("mixtral")
    for name in (r"\.block_sparse_moe\.experts$", r"\.mlp\.experts$", r"\.(mlp|block_sparse_moe)\.experts$"):
        plan = make_plan([{"match": {"name": name}, "replace": {"class": "KTransformersExperts"}}], model)
        assert [planned.name for planned in plan.replacements] == models.moe_layers(model)
