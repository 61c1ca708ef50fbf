"""One layer's floats come back from the checkpoint bit for bit, in the module that lost them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.checkpoints import reload_module
from ktransformers.errors import CheckpointError
from ktransformers.injection import build_meta_model
from tests import models
from tests.checkpoints.folders import make_checkpoint, rewrite


@pytest.mark.parametrize(
    "build",
    [models.make_qwen3_moe, models.make_mixtral, models.make_gpt_oss, models.make_granite_moe, models.make_deepseek_v3],
)
def test_freed_experts_are_read_again(build: Callable[..., Any], tmp_path: Path) -> None:
    model = build()
    models.save_with_tokenizer(model, tmp_path)
    name = models.moe_layers(model)[-1]
    wanted = model.get_submodule(name)
    freed = copy.deepcopy(wanted).to("meta")
    meta = build_meta_model(tmp_path)
    reload_module(tmp_path, meta, name, freed, torch.float32)
    assert all(torch.equal(tensor, wanted.get_parameter(n)) for n, tensor in freed.named_parameters())
    assert all(parameter.is_meta for parameter in meta.parameters())


def test_they_come_in_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    name = "model.layers.1.mlp.experts"
    meta = build_meta_model(tmp_path)
    target = copy.deepcopy(meta.get_submodule(name))
    reload_module(tmp_path, meta, name, target, torch.bfloat16)
    assert {p.dtype for p in target.parameters()} == {torch.bfloat16}


def test_a_checkpoint_that_lost_them_meanwhile_is_an_error(tmp_path: Path) -> None:
    rewrite(make_checkpoint(tmp_path), lambda name: None if "down_proj" in name else name)
    name = "model.layers.1.mlp.experts"
    meta = build_meta_model(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"no longer holds the weights of model\.layers\.1\.mlp\.experts: down_proj"
    ):
        reload_module(tmp_path, meta, name, copy.deepcopy(meta.get_submodule(name)), torch.float32)
