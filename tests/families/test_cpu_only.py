"""cpu-only.yaml on a tiny model of every family: no router is touched, and everything else heavy is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ktransformers.injection import make_plan
from ktransformers.operators.experts import KTransformersExperts
from ktransformers.operators.linear import KTransformersLinear
from tools.families.scan import ExpertsClass, experts_classes
from tools.families.tiny import NotBuiltError, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # families' own, at import

# Whose experts the rules do not take: see docs/models.md.
_OTHER_EXPERTS = (
    "DbrxExperts",
    "JetMoeParallelExperts",
    "LongcatFlashExperts",
    "NllbMoeExperts",
    "SwitchTransformersExperts",
)
FAMILIES = [experts for experts in experts_classes() if experts.name not in _OTHER_EXPERTS]


def _routers(model: nn.Module) -> list[str]:
    """Names of the routers by what transformers records as `router_logits`, and by their classes' names."""
    recorded: set[type] = set()
    for module in model.modules():
        wanted = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for entry in wanted if isinstance(wanted, list) else [wanted]:
            target = getattr(entry, "target_class", entry)
            if isinstance(target, type):
                recorded.add(target)
    beside = {name.rpartition(".")[0] for name, _ in model.named_modules() if name.endswith(".experts")}
    return [
        name
        for name, module in model.named_modules()
        if (type(module) in recorded and not _holds_experts(module))  # some families record their blocks
        or "Router" in type(module).__name__
        or (name.rpartition(".")[0] in beside and name.rpartition(".")[2] in ("gate", "router", "shared_expert_gate"))
    ]


def _holds_experts(module: nn.Module) -> bool:
    return any(name.rpartition(".")[2] == "experts" for name, _ in module.named_modules())


@pytest.mark.parametrize("experts", FAMILIES, ids=lambda experts: experts.name)
def test_routers_stay_and_all_other_linears_are_replaced(experts: ExpertsClass) -> None:
    try:
        with torch.device("meta"):
            model: Any = tiny_model(experts)
    except NotBuiltError:
        pytest.skip("transformers cannot build it itself, see tests/families/test_models.py")
    plan = make_plan("cpu-only", model)
    replaced = {planned.name: planned.operator for planned in plan.replacements}
    routers = _routers(model)
    touched = [name for name in replaced for router in routers if name == router or name.startswith(f"{router}.")]
    assert touched == []
    # Whatever gives one number an expert is a router, whatever it is called.
    sizes = {planned.name: model.get_submodule(planned.name) for planned in plan.replacements}
    attention = ("attn", "attention", "mixer", "mamba")
    scores = [
        name
        for name, module in sizes.items()
        if isinstance(module, nn.Linear) and module.out_features == 8 and not any(word in name for word in attention)
    ]
    assert scores == []
    assert KTransformersExperts in replaced.values()
    left = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in replaced and not any(name.startswith(r) for r in routers)
    }
    assert {name.rpartition(".")[2] for name in left} <= {"dt_proj"}
    assert KTransformersLinear in replaced.values()
