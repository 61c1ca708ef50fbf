"""One module's float weights, read again from the checkpoint after they were freed."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from ktransformers.checkpoints.conversion import convert_into, names_for
from ktransformers.checkpoints.headers import read_headers
from ktransformers.errors import CheckpointError

__all__ = ["reload_module"]


def reload_module(folder: Path, meta_model: PreTrainedModel, name: str, target: nn.Module, dtype: torch.dtype) -> None:
    """Gives `target`, the module `name` of the checkpoint's model, its float parameters in `dtype`.

    Only this module's tensors are read. `meta_model` is the whole model on the meta device and stays there.
    Raises `CheckpointError` when the files no longer hold all of them.
    """
    files = read_headers(folder)
    if files is None:
        raise CheckpointError(f"{folder} is no safetensors checkpoint, so the weights of {name} cannot be read again")
    skeleton = meta_model.get_submodule(name)
    filled = copy.deepcopy(skeleton).to(dtype)
    meta_model.set_submodule(name, filled)
    try:
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            tensors = {}
            for source in names_for(meta_model, files.tensors, f"{name}."):
                path = files.tensors[source].file
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
                tensors[source] = opened[path].get_slice(source)
            convert_into(meta_model, tensors, "cpu")
    finally:
        meta_model.set_submodule(name, skeleton)
    lost = [n for n, parameter in filled.named_parameters() if parameter.is_meta]
    if lost:
        raise CheckpointError(f"{folder} no longer holds the weights of {name}: {', '.join(lost)}")
    for owner, parameter in filled.named_parameters():
        path_to, _, leaf = owner.rpartition(".")
        target.get_submodule(path_to)._parameters[leaf] = nn.Parameter(parameter.data, requires_grad=False)
