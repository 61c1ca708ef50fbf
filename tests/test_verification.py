"""`verify`: what a format loses is fine, a wrong weight is pointed at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ktransformers
from ktransformers.errors import InjectionError
from ktransformers.verification import verify
from tests import models
from tests.checkpoints.gguf.writer import Wish, write_gguf


def _injected(backend: str, build: Callable[..., Any] = models.make_qwen3_moe, **options: Any) -> tuple[Any, Any]:
    model = build()
    rule = {"class": "KTransformersExperts", "kwargs": {"backend": backend, "threads": 1}}
    return model, ktransformers.inject(model, [{"match": {"name": r"\.experts$"}, "replace": rule}], **options)


@pytest.mark.parametrize("backend", ["BF16", "INT8", "FP8", "INT4"])
@pytest.mark.parametrize("build", [models.make_qwen3_moe, models.make_gpt_oss])
def test_every_layer_of_every_format_is_as_far_off_as_its_format(backend: str, build: Callable[..., Any]) -> None:
    model, report = _injected(backend, build)
    checks = list(verify(model, report))
    assert [check.name for check in checks] == [entry.name for entry in report.replacements]
    assert all(check.passed and 0 < check.relative_error < 0.2 for check in checks), checks
    assert checks == list(verify(model, report))  # the same tokens each time


@pytest.mark.parametrize("backend", ["BF16", "INT4"])
def test_gate_and_up_in_each_other_s_place_are_pointed_at(backend: str) -> None:
    model, report = _injected(backend)
    wrong = report.replacements[1].name
    original = model.get_submodule(wrong).orig_module
    with torch.no_grad():
        original.gate_up_proj.copy_(torch.cat(original.gate_up_proj.chunk(2, dim=1)[::-1], dim=1))
    checks = list(verify(model, report))
    assert [check.name for check in checks if not check.passed] == [wrong]
    assert next(check for check in checks if not check.passed).cosine < 0.7


def test_a_result_that_is_no_number_is_no_pass() -> None:
    model, report = _injected("BF16")
    with torch.no_grad():
        model.get_submodule(report.replacements[0].name).orig_module.down_proj.fill_(float("nan"))
    assert next(check.passed for check in verify(model, report)) is False


@pytest.mark.parametrize("change", [False, True])
def test_freed_floats_are_read_again_from_where_the_model_came_from(change: bool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    models.make_qwen3_moe(mlp_only_layers=[]).save_pretrained(folder)
    loaded = ktransformers.KTransformer.from_pretrained(folder, "auto", threads=1)
    if change:  # what runs is then no longer what the files hold
        models.make_qwen3_moe(mlp_only_layers=[], seed=1).save_pretrained(folder)
    checks = list(loaded.verify(tokens=8))
    assert len(checks) == 3
    assert [check.passed for check in checks] == [not change] * 3
    assert not any(parameter.device.type != "meta" for parameter in _originals(loaded.model))


def _originals(model: Any) -> list[torch.nn.Parameter]:
    names = [name for name, _ in model.named_modules() if name.endswith(".experts")]
    return [parameter for name in names for parameter in model.get_submodule(name).orig_module.parameters()]


def test_what_a_gguf_file_runs_in_is_what_is_verified(tmp_path: Path) -> None:
    original = models.make_qwen3_moe(mlp_only_layers=[])
    write_gguf(original, tmp_path / "model.gguf", Wish(types={"": "F32", "_exps": "Q8_0"}))
    checks = list(ktransformers.KTransformer.from_pretrained(tmp_path / "model.gguf", "auto", threads=1).verify())
    assert all("INT8_GROUPED" in check.runs and check.passed for check in checks), checks


def test_without_floats_or_without_experts_it_says_so() -> None:
    model, report = _injected("INT8", keep_float=False)
    with pytest.raises(InjectionError, match="keep_float=True"):
        list(verify(model, report))
    plain = models.make_qwen3_moe()
    report = ktransformers.inject(plain, [{"match": {"name": r"\.experts$"}, "replace": {"class": "default"}}])
    with pytest.raises(InjectionError, match="nothing to verify"):
        list(verify(plain, report))


def test_what_generates_is_verified_not_what_takes_prompts() -> None:
    model = models.make_qwen3_moe()
    kwargs = {"backend": "INT8", "threads": 1, "prefill_op": "KExpertsTorch", "prefill_device": "cpu"}
    rule = {"class": "KTransformersExperts", "kwargs": {**kwargs, "prefill_threshold": 8}}
    report = ktransformers.inject(model, [{"match": {"name": r"\.experts$"}, "replace": rule}])
    wrong = report.replacements[0].name
    original = model.get_submodule(wrong).orig_module
    with torch.no_grad():
        original.down_proj.copy_(original.down_proj.flip(0))
    assert [check.name for check in verify(model, report, tokens=64) if not check.passed] == [wrong]
