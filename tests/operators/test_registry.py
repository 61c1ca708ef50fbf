"""Names of operators: ours, upstream's, and what an unknown one is told."""

from __future__ import annotations

import pytest

from ktransformers.errors import UnknownOperatorError
from ktransformers.operators import registry
from ktransformers.operators.experts import KTransformersExperts


@pytest.mark.parametrize(
    "name",
    [
        "KTransformersExperts",
        "KTransformersExpertsV2",
        "ktransformers.operators.experts.KTransformersExperts",
        "ktransformers.operators.experts.KTransformersExpertsV2",
        "ktransformers.operators.experts.KGlm4Experts",
    ],
)
def test_upstreams_names_are_ours(name: str) -> None:
    assert registry.resolve(name) is KTransformersExperts
    assert registry.is_ours(name)
    assert name in registry.known_operators()


def test_a_typo_names_the_nearest_and_all_that_is_supported() -> None:
    with pytest.raises(
        UnknownOperatorError, match=r"Did you mean .*KTransformersExperts.*Supported: ktransformers"
    ) as caught:
        registry.resolve("ktransformers.operators.experts.KTransformerExpert")
    assert "KTransformersExperts" in str(caught.value)


def test_a_class_that_does_not_exist_is_named() -> None:
    with pytest.raises(UnknownOperatorError, match="DoesNotExist"):
        registry.resolve("ktransformers.operators.experts.DoesNotExist")


def test_upstreams_operators_of_another_module_are_ours_there() -> None:
    path = "ktransformers.operators.ascend.ascend_experts.KTransformersExpertsW8A8"
    assert registry.resolve(path) is KTransformersExperts
    assert registry.canonical(path) == "KTransformersExperts"
    assert registry.canonical("ktransformers.operators.experts.KTransformersExpertsW8A8") is None


@pytest.mark.parametrize(
    "op", ["KExpertsCPU", "ktransformers.operators.experts.KExpertsTorch", "KExpertsMarlin", "KLinearCPU"]
)
def test_an_op_in_the_place_of_a_class_is_told_where_it_belongs(op: str) -> None:
    with pytest.raises(UnknownOperatorError, match="generate_op"):
        registry.resolve(op)


@pytest.mark.parametrize("module", ["attention.KDeepseekV9Attention", "RoPE.RotaryEmbeding"])
def test_an_unknown_name_among_upstreams_gpu_operators_is_told_what_to_do(module: str) -> None:
    with pytest.raises(UnknownOperatorError, match="correct its name, or drop the rule"):
        registry.resolve(f"ktransformers.operators.{module}")


def test_classes_of_others_are_not_ours_to_resolve() -> None:
    assert not registry.is_ours("my_package.MyExperts")
    assert not registry.is_ours("torch.nn.Linear")
