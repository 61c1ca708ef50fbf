"""Views of weights: right numbers for every layout, and no copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from ktransformers.errors import UnsupportedModuleError
from ktransformers.experts import ExpertsSpec, expert_weights, layer_weights
from tests import models


def _make_experts(build: Callable[..., Any]) -> Any:
    model = build()
    return model.get_submodule(models.moe_layers(model)[-1]).requires_grad_(False)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("build", [models.make_qwen3_moe, models.make_mixtral, models.make_gpt_oss])
def test_one_experts_views_compute_what_the_module_computes(build: Callable[..., Any]) -> None:
    module = _make_experts(build)
    spec = ExpertsSpec.from_module(module)
    assert spec.gate is not None
    module.config._experts_implementation = "eager"
    x = torch.randn(5, spec.hidden_dim)
    views = expert_weights(module, spec, 3)
    assert views.gate is not None
    gate, up = functional.linear(x, views.gate, views.gate_bias), functional.linear(x, views.up, views.up_bias)
    ours = functional.linear(spec.gate(gate, up), views.down, views.down_bias)
    theirs = module(x, torch.full((5, 1), 3), torch.ones(5, 1))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("build", [models.make_qwen3_moe, models.make_gpt_oss])
def test_views_share_the_modules_memory(build: Callable[..., Any]) -> None:
    module = _make_experts(build)
    spec = ExpertsSpec.from_module(module)
    views = layer_weights(module, spec)
    assert views.gate is not None
    assert views.gate.shape == views.up.shape == (spec.num_experts, spec.intermediate_dim, spec.hidden_dim)
    assert views.down.shape == (spec.num_experts, spec.hidden_dim, spec.intermediate_dim)
    assert _storage(views.gate) == _storage(views.up) == _storage(module.gate_up_proj)
    assert _storage(views.down) == _storage(module.down_proj)


def test_an_expert_beyond_the_last_is_an_index_error() -> None:
    module = _make_experts(models.make_qwen3_moe)
    with pytest.raises(IndexError, match="expert 8 of 8"):
        expert_weights(module, ExpertsSpec.from_module(module), 8)


def test_weights_on_meta_are_refused_before_anybody_reads_them() -> None:
    module = _make_experts(models.make_qwen3_moe).to("meta")
    with pytest.raises(UnsupportedModuleError, match="meta device"):
        layer_weights(module, ExpertsSpec.from_module(module))
