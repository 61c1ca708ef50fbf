"""One layer's floats come back from the checkpoint bit for bit, in the module that lost them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ktransformers.checkpoints import FreedFloats
from ktransformers.checkpoints import floats as checkpoint_floats
from ktransformers.errors import CheckpointError
from ktransformers.injection import build_meta_model
from tests import models
from tests.checkpoints.folders import make_checkpoint, rewrite

FIRST, SECOND = "model.layers.1.mlp.experts", "model.layers.2.mlp.experts"


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
    _floats(tmp_path, [name])(name, freed)
    assert all(torch.equal(tensor, wanted.get_parameter(n)) for n, tensor in freed.named_parameters())


def test_they_come_in_the_dtype_that_the_module_has(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    floats = _floats(tmp_path, [FIRST])
    for dtype in (torch.bfloat16, torch.float32):
        target = build_meta_model(tmp_path).get_submodule(FIRST).to(dtype)
        floats(FIRST, target)
        assert {(p.dtype, p.is_meta) for p in target.parameters()} == {(dtype, False)}


def test_files_are_looked_through_once_however_many_layers_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path)
    opened: list[Path] = []
    real = checkpoint_floats.open_files
    monkeypatch.setattr(checkpoint_floats, "open_files", lambda folder, *a: opened.append(folder) or real(folder, *a))
    floats = _floats(tmp_path, [FIRST, SECOND])
    floats(FIRST, _freed(tmp_path, FIRST))
    floats(SECOND, _freed(tmp_path, SECOND))
    assert len(opened) == 1


def test_files_that_changed_meanwhile_are_looked_through_again(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    floats = _floats(tmp_path, [FIRST])
    floats(FIRST, before := _freed(tmp_path, FIRST))
    # In another order and with other numbers: at the old places in the file is something else now.
    tensors = {name: tensor + 1 for name, tensor in reversed(load_file(tmp_path / "model.safetensors").items())}
    save_file({"another": torch.zeros(3), **tensors}, tmp_path / "model.safetensors", {"format": "pt"})
    floats(FIRST, after := _freed(tmp_path, FIRST))
    assert all(torch.equal(after.get_parameter(name), tensor + 1) for name, tensor in before.named_parameters())


def test_a_checkpoint_that_lost_them_meanwhile_is_an_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    floats = _floats(tmp_path, [FIRST])
    floats(FIRST, _freed(tmp_path, FIRST))
    rewrite(tmp_path, lambda name: None if "down_proj" in name else name)
    lost = r"no longer holds the weights of model\.layers\.1\.mlp\.experts: down_proj"
    with pytest.raises(CheckpointError, match=lost):
        floats(FIRST, _freed(tmp_path, FIRST))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        floats(FIRST, _freed(tmp_path, FIRST))


def _floats(folder: Path, names: Sequence[str]) -> FreedFloats:
    return FreedFloats(folder, partial(build_meta_model, folder), names)


def _freed(folder: Path, name: str) -> nn.Module:
    return build_meta_model(folder).get_submodule(name).to(torch.float32)
