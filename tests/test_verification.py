"""`verify`: what a format loses is fine, a wrong weight is pointed at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ktransformers
from ktransformers.errors import InjectionError
from ktransformers.verification import verify
from tests import models


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
