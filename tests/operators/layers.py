"""Experts modules, operators on them, and inputs for both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ktransformers.operators.experts import KTransformersExperts
from tests import models

KEY = "model.layers.1.mlp.experts"


def make_experts(build: Callable[..., Any] = models.make_qwen3_moe, **overrides: Any) -> Any:
    """The last experts module of a tiny model, set to transformers' eager arithmetic."""
    model = build(**overrides)
    module: Any = model.get_submodule(models.moe_layers(model)[-1]).requires_grad_(False)
    module.config._experts_implementation = "eager"
    return module


def make_operator(module: Any = None, **kwargs: Any) -> KTransformersExperts:
    """A loaded operator in the place of `module`."""
    module = module or make_experts()
    operator = KTransformersExperts(KEY, None, module.config, module, **kwargs)
    operator.load()
    return operator


def make_batch(
    module: nn.Module, tokens: int, *, k: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states (T, H), ids (T, k) without repeats, weights (T, k) that sum to 1."""
    generator = torch.Generator().manual_seed(seed)
    config: Any = module.config
    experts = module.get_parameter("down_proj").shape[0]
    hidden = torch.randn(tokens, config.hidden_size, generator=generator).to(dtype)
    scores, ids = torch.rand(tokens, experts, generator=generator).topk(k, dim=-1)
    return hidden, ids, (scores / scores.sum(-1, keepdim=True)).to(dtype)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L2 error."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())
