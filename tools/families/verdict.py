"""What becomes of one experts class: the kernel, torch, or a refusal, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ktransformers.errors import UnsupportedModuleError
from ktransformers.experts import ExpertsSpec
from tools.families.scan import ExpertsClass
from tools.families.tiny import NotBuiltError, paths_of, tiny_config, tiny_model

__all__ = ["Verdict", "judge", "module_on_meta"]


@dataclass(frozen=True)
class Verdict:
    """One row of the table. `path` is empty when no model of the family can be built small."""

    experts: ExpertsClass
    path: str
    formula: str
    runs: str  # "kernel", "torch" or "refused"
    why: str


def judge(experts: ExpertsClass) -> Verdict:
    """Reads the class as the injector would, on a tiny model without memory."""
    module, path = module_on_meta(experts)
    try:
        spec = ExpertsSpec.from_module(module)
    except UnsupportedModuleError as error:
        return Verdict(experts, path, "", "refused", str(error))
    formula = "" if spec.gate is None else str(spec.gate)
    traits = {
        "biases": spec.has_bias,
        "transposed": spec.is_transposed,
        "interleaved": not spec.is_concatenated,
        "each output normalised": spec.has_post_expert_norm,
        "rows come sorted by expert": spec.is_presorted,
    }
    layout = ", ".join(name for name, is_so in traits.items() if is_so)
    formula = f"{formula}; {layout}" if formula and layout else formula or layout
    return Verdict(experts, path, formula, "torch" if spec.unsupported else "kernel", "; ".join(spec.unsupported))


def module_on_meta(experts: ExpertsClass) -> tuple[nn.Module, str]:
    """An experts module and its dotted name with N for the layer, out of a model where one can be built."""
    with torch.device("meta"):
        try:
            model = tiny_model(experts)
        except NotBuiltError:
            return _alone(experts), ""
    path = paths_of(model, experts)[0]
    return model.get_submodule(path), re.sub(r"\.\d+\.", ".N.", path)


def _alone(experts: ExpertsClass) -> nn.Module:
    """With the first of the family's configurations that has what the class reads; text ones first."""
    configs = experts.configuration()
    names = sorted((n for n in vars(configs) if n.endswith("Config")), key=lambda name: "Text" not in name)
    own = [name for name in names if name.removesuffix("Config") in experts.name]
    problems = []
    for name in own + names:
        try:
            module: Any = experts.load()(tiny_config(getattr(configs, name), experts.family))
        except (AttributeError, TypeError) as error:
            problems.append(f"{name}: {error}")
            continue
        return module  # type: ignore[no-any-return]
    raise NotBuiltError(f"{experts.name}: {'; '.join(problems)}")
