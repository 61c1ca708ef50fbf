"""`KExpertsTorch`: eager arithmetic for every layout, from weights that stay or that travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from ktransformers.experts import ExpertsSpec
from ktransformers.operators.experts_torch import KExpertsTorch
from tests import models
from tests.operators.layers import make_batch, make_experts, relative_error

CPU = torch.device("cpu")


def _make_op(module: nn.Module, *, resident: bool = True) -> KExpertsTorch:
    op = KExpertsTorch(module, ExpertsSpec.from_module(module), CPU, resident=resident)
    op.load()
    return op


def _make_nemotron_experts() -> Any:
    config = NemotronHConfig(n_routed_experts=4, hidden_size=24, moe_intermediate_size=16, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    module = NemotronHExperts(config).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(generator=torch.Generator().manual_seed(2)).mul_(0.2)
    return module


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("build", [models.make_qwen3_moe, models.make_gpt_oss, models.make_mixtral])
def test_it_is_transformers_eager_arithmetic(build: Callable[..., Any], resident: bool) -> None:
    module = make_experts(build)
    batch = make_batch(module, 30)
    assert relative_error(_make_op(module, resident=resident).forward(*batch), module(*batch)) < 1e-6


def test_experts_without_a_gate() -> None:
    module = _make_nemotron_experts()
    batch = make_batch(module, 12)
    assert relative_error(_make_op(module).forward(*batch), module(*batch)) < 1e-6


def test_a_norm_of_each_experts_output() -> None:
    module = make_experts()
    module.has_post_expert_norm = True
    module.post_expert_norm = nn.RMSNorm(64).requires_grad_(False)
    module.config._experts_implementation = "batched_mm"  # the eager text of this class knows of no norm
    batch = make_batch(module, 12)
    assert relative_error(_make_op(module).forward(*batch), module(*batch)) < 1e-6


def test_weights_already_on_the_device_are_not_copied() -> None:
    assert _make_op(make_experts(), resident=True).nbytes == 0


def test_a_nan_row_stays_in_its_row() -> None:
    module = make_experts()
    hidden, ids, weights = make_batch(module, 6)
    wanted = _make_op(module).forward(hidden, ids, weights)
    hidden[2] = float("nan")
    got = _make_op(module).forward(hidden, ids, weights)
    assert got[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(got[others], wanted[others])


def test_hidden_states_wider_than_the_weights_keep_their_precision() -> None:
    module = make_experts()
    batch = make_batch(module, 10)
    wanted = module(*batch)
    narrow = module.to(torch.bfloat16)
    exact = make_experts().to(torch.bfloat16).float()
    exact.config._experts_implementation = "eager"
    got = _make_op(narrow).forward(*batch)
    assert got.dtype == torch.float32
    assert relative_error(got, exact(*batch)) < 1e-6 < relative_error(got, wanted)
