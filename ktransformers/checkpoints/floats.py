"""One module's float weights, read again from the checkpoint after they were freed."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ktransformers.checkpoints.decoded import open_files
from ktransformers.checkpoints.source import CheckpointSource
from ktransformers.errors import CheckpointError

__all__ = ["reload_module"]


def reload_module(folder: Path, meta_model: PreTrainedModel, name: str, target: nn.Module, dtype: torch.dtype) -> None:
    """Gives `target`, the module `name` of the checkpoint's model, its float parameters in `dtype`.

    Only this module's tensors are read. `meta_model` is the whole model on the meta device and stays there.
    Raises `CheckpointError` when the files no longer hold all of them.
    """
    files = open_files(folder, meta_model, dtype)
    if files is None:
        raise CheckpointError(
            f"{folder} is no checkpoint of safetensors that is read here, so the weights of {name} cannot be read again"
        )
    meta_model.get_submodule(name).to(dtype)
    with CheckpointSource(files, meta_model, [name]).modules([name]) as (weights,):
        weights.fill(target)
