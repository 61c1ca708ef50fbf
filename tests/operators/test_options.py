"""kwargs of a rule: every problem at once, with the nearest names; upstream's spellings accepted."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
from torch import nn

from ktransformers.operators.experts import KTransformersExperts
from ktransformers.operators.linear import KTransformersLinear
from ktransformers.operators.options import ExpertsOptions, LinearOptions
from tests.operators.layers import KEY, make_experts

SEED_RULE = {
    "prefill_device": "cuda",
    "prefill_op": "KExpertsTorch",
    "generate_device": "cpu",
    "generate_op": "KExpertsCPU",
    "out_device": "cuda",
    "backend": "AMXINT8",
}


def _problems(**kwargs: Any) -> str:
    return "; ".join(ExpertsOptions.problems(kwargs))


def test_the_rule_of_the_guides_has_no_problems() -> None:
    assert _problems(**SEED_RULE) == ""


def test_linears_have_the_same_arguments_with_ops_of_their_own() -> None:
    parameters = inspect.signature(KTransformersLinear).parameters
    for field in dataclasses.fields(LinearOptions):
        assert parameters[field.name].default == field.default
    assert len(parameters) == len(dataclasses.fields(LinearOptions)) + 4
    assert {f.name for f in dataclasses.fields(LinearOptions)} == {f.name for f in dataclasses.fields(ExpertsOptions)}


@pytest.mark.parametrize("nothing", [None, "None", "none", ""])
def test_upstreams_spellings_of_nothing(nothing: str | None) -> None:
    kwargs = {"prefill_op": nothing, "backend": nothing, "out_device": nothing}
    assert _problems(**kwargs) == ""
    options = ExpertsOptions.read(kwargs)
    assert (options.prefill_op, options.backend, options.out_device) == (None, None, None)


@pytest.mark.parametrize("backend", ["AMXInt8", "amxbf16", "AMXBF16", "INT8", "auto", "AVX2"])
def test_backends_in_any_case(backend: str) -> None:
    assert _problems(backend=backend) == ""


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"backned": "AMXINT8"}, "did you mean 'backend'"),
        ({"backend": "AMXINT9"}, "AMXINT8"),
        ({"backend": "RAWINT4"}, "not in this version"),
        ({"generate_op": "KExpertCPU"}, "Did you mean KExpertsCPU"),
        ({"generate_op": "KExpertsMarlin"}, "CUDA kernel that this package does not have"),
        ({"prefill_op": "KExpertsMarlin"}, "prefill_op: KExpertsMarlin"),
        ({"generate_device": "cuda"}, "KExpertsCPU runs on the CPU"),
        ({"generate_device": "cuda:1"}, "KExpertsCPU runs on the CPU"),
        ({"out_device": "cdua"}, "'cuda'"),
        ({"prefill_threshold": -1}, "prefill_threshold"),
        ({"prefill_threshold": True}, "prefill_threshold"),
        ({"threads": 0}, "threads"),
        ({"threads": "two"}, "threads"),
        ({"threads": 1_000_000}, "threads: a whole number from 1 to 4096, not 1000000"),
        ({"generate_op": ["KExpertsCPU"]}, "generate_op: one of KExpertsCPU, KExpertsTorch, not ['KExpertsCPU']"),
        ({"prefill_op": {"a": 1}}, "prefill_op: one of KExpertsCPU, KExpertsTorch, not {'a': 1}"),
        ({"backend": ["INT8"]}, "backend"),
        ({"out_device": ["cpu"]}, "out_device: ['cpu'] is no device"),
        ({"rotate": "yes"}, "rotate: true or false"),
    ],
)
def test_a_wrong_value_is_one_sentence_with_the_way_out(kwargs: dict[str, Any], told: str) -> None:
    problems = ExpertsOptions.problems(kwargs)
    assert len(problems) == 1
    assert told in problems[0]


def test_all_problems_are_told_together() -> None:
    assert len(ExpertsOptions.problems({"backend": "X1", "generate_op": "Y", "threads": -1, "colour": "red"})) == 4


def test_missing_devices_are_a_problem_only_when_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "this host has none" in _problems(out_device="cuda", strict=True)
    monkeypatch.setenv("KT_STRICT_DEVICES", "ON")
    assert "this host has none" in _problems(out_device="cuda")
    monkeypatch.setenv("KT_STRICT_DEVICES", "OFF")
    assert _problems(out_device="cuda") == ""


@pytest.mark.parametrize(
    ("variable", "value"), [("KT_STRICT_DEVICES", "perhaps"), ("KT_NUM_THREADS", "abc"), ("CPUINFER_ENABLE_AMX", "no!")]
)
def test_a_variable_that_is_not_understood_is_found_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    module = make_experts().to("meta")
    problems = KTransformersExperts.check(key=KEY, orig_module=module, config=module.config, kwargs=SEED_RULE)
    assert len(problems) == 1
    assert f"environment variable {variable} is {value!r}: it takes" in problems[0]


@pytest.mark.parametrize("count", [9, 0, -1])
def test_more_experts_a_token_than_there_are_or_none_is_found_before_weights_are_read(count: int) -> None:
    module = make_experts().to("meta")
    module.config.num_experts_per_tok = count
    (problem,) = KTransformersExperts.check(key=KEY, orig_module=module, config=module.config, kwargs={})
    assert problem.startswith(f"the configuration sends each token to {count} experts, and Qwen3MoeExperts has 8")


def test_a_tier_this_machine_lacks_is_a_problem_only_when_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUINFER_ENABLE_AVX2", "OFF")
    assert _problems(backend="AVX2INT8") == ""
    assert "CPUINFER_ENABLE_AVX2=OFF" in _problems(backend="AVX2INT8", strict=True)


def test_check_runs_on_a_module_without_weights() -> None:
    module = make_experts().to("meta")
    assert KTransformersExperts.check(key=KEY, orig_module=module, config=module.config, kwargs=SEED_RULE) == []


def test_check_tells_of_kwargs_and_of_the_module_together() -> None:
    problems = KTransformersExperts.check(key=KEY, orig_module=nn.Linear(2, 2), config=None, kwargs={"backned": 1})
    assert len(problems) == 2
    assert "Linear is no experts module" in problems[1]


def test_the_signature_takes_what_the_options_know() -> None:
    parameters = inspect.signature(KTransformersExperts).parameters
    for field in dataclasses.fields(ExpertsOptions):
        assert parameters[field.name].default == field.default
    assert len(parameters) == len(dataclasses.fields(ExpertsOptions)) + 4
