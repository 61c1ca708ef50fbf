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


@pytest.mark.parametrize("op", ["KExpertsCPU", "ktransformers.operators.experts.KExpertsTorch", "KExpertsMarlin"])
def test_an_op_in_the_place_of_a_class_is_told_where_it_belongs(op: str) -> None:
    with pytest.raises(UnknownOperatorError, match="generate_op"):
        registry.resolve(op)


@pytest.mark.parametrize(
    "module", ["linear.KTransformersLinear", "attention.KDeepseekV2Attention", "RoPE.RotaryEmbedding"]
)
def test_upstreams_gpu_operators_are_known_and_not_here(module: str) -> None:
    with pytest.raises(UnknownOperatorError, match="drop the rule"):
        registry.resolve(f"ktransformers.operators.{module}")


def test_classes_of_others_are_not_ours_to_resolve() -> None:
    assert not registry.is_ours("my_package.MyExperts")
    assert not registry.is_ours("torch.nn.Linear")
