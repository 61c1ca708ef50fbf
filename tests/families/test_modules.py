"""Every experts class of the installed transformers, alone: in the kernel with the right numbers, or with a reason."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from ktransformers.errors import UnsupportedModuleError
from ktransformers.experts import ExpertsSpec
from ktransformers.operators.experts import KTransformersExperts
from tests import models
from tests.operators.layers import relative_error
from tools.families.scan import ExpertsClass, experts_classes
from tools.families.verdict import module_on_meta

TOLERANCE = {"BF16": 0.01, "INT8": 0.03}
COMMON = [experts for experts in experts_classes() if experts.decorated]
OTHERS = [experts for experts in experts_classes() if not experts.decorated]
# Outside the interface, and yet the same arithmetic.
SAME = {"Llama4TextExperts", "Step3p7Experts"}
# Whose arithmetic the kernel does not have; the words name what stands in the way.
IN_TORCH = {
    "Inkling2Experts": "act_fn is Inkling2SoftcappedSwiGLU",
    "Inkling2LoopExperts": "act_fn is Inkling2LoopSoftcappedSwiGLU",
}
IN_KERNEL = [experts for experts in COMMON if experts.name not in IN_TORCH]
REFUSED = {
    "DbrxExperts": "three dimensions",
    "InklingSharedExperts": "forward takes",
    "JetMoeParallelExperts": "forward takes",
    "LongcatFlashExperts": "outside",
    "NllbMoeExperts": "module of its own",
    "SwitchTransformersExperts": "module of its own",
}

pytestmark = pytest.mark.filterwarnings("ignore")  # families' own, at import


@cache
def _module(experts: ExpertsClass) -> Any:
    """With weights of realistic spread, set to its own eager text."""
    module: Any = module_on_meta(experts)[0].to_empty(device="cpu").requires_grad_(False)
    models.fill(module)
    module.config._experts_implementation = "eager"
    return module


def _make_batch(module: Any, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """24 tokens of 2 experts each, or of one where the family takes one. Weights in fp32."""
    spec, generator = ExpertsSpec.from_module(module), torch.Generator().manual_seed(7)
    hidden = torch.randn(24, spec.hidden_dim, generator=generator)
    scores, ids = torch.rand(24, spec.num_experts, generator=generator).topk(min(2, spec.top_k or 2), dim=-1)
    return hidden.to(dtype), ids, scores / scores.sum(-1, keepdim=True)


def _make_operator(module: Any, **kwargs: Any) -> KTransformersExperts:
    operator = KTransformersExperts("experts", None, module.config, module, threads=1, **kwargs)
    operator.load()
    return operator


def test_at_least_sixty_four_classes_of_the_experts_interface_run_in_the_kernel() -> None:
    assert len(IN_KERNEL) >= 64


@pytest.mark.parametrize("backend", ["BF16", "INT8"])
@pytest.mark.parametrize("experts", IN_KERNEL, ids=lambda experts: experts.name)
def test_the_kernel_agrees_with_the_familys_own_text(experts: ExpertsClass, backend: str) -> None:
    module = _module(experts)
    operator, batch = _make_operator(module, backend=backend, strict=True), _make_batch(module)
    assert operator.describe()["op"] == "KExpertsCPU"
    wanted = module(*batch)
    assert wanted.isfinite().all()
    assert relative_error(operator(*batch), wanted) < TOLERANCE[backend]


@pytest.mark.parametrize("experts", IN_KERNEL, ids=lambda experts: experts.name)
def test_routing_weights_in_either_dtype_and_sentinels(experts: ExpertsClass) -> None:
    module = _module(experts)
    operator = _make_operator(module, backend="INT8")
    hidden, ids, weights = _make_batch(module, torch.bfloat16)
    got = operator(hidden, ids, weights)
    assert got.dtype == torch.bfloat16
    narrow = weights.bfloat16()
    assert torch.equal(operator(hidden, ids, narrow), operator(hidden, ids, narrow.float()))
    assert relative_error(operator(hidden, ids, narrow), got) < 0.01
    sentinels, none = ids.clone(), weights.clone()
    sentinels[::3, -1], none[::3, -1] = operator.num_experts, 0.0
    assert torch.equal(operator(hidden, sentinels, none), operator(hidden, ids, none))


@pytest.mark.parametrize("experts", COMMON, ids=lambda experts: experts.name)
def test_torch_computes_exactly_what_the_family_does(experts: ExpertsClass) -> None:
    module = _module(experts)
    operator, batch = _make_operator(module, generate_op="KExpertsTorch"), _make_batch(module)
    assert relative_error(operator(*batch), module(*batch)) < 2e-6


@pytest.mark.parametrize("experts", [e for e in COMMON if e.name in IN_TORCH], ids=lambda experts: experts.name)
def test_a_class_that_the_kernel_does_not_compute_runs_in_torch_and_says_why(experts: ExpertsClass) -> None:
    module = _module(experts)
    assert IN_TORCH[experts.name] in " ".join(ExpertsSpec.from_module(module).unsupported)
    assert _make_operator(module).describe()["op"] == "KExpertsTorch"


@pytest.mark.parametrize("experts", [e for e in OTHERS if e.name not in SAME], ids=lambda experts: experts.name)
def test_a_class_outside_the_interface_is_refused_by_name_and_reason(experts: ExpertsClass) -> None:
    module, _ = module_on_meta(experts)
    with pytest.raises(UnsupportedModuleError, match=experts.name) as error:
        ExpertsSpec.from_module(module)
    assert REFUSED[experts.name] in str(error.value)
