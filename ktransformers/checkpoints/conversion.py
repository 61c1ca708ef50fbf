"""transformers' own conversion from names and layouts on disk to a model's parameters, run on any dictionary of
tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from ktransformers.checkpoints.progress import progress_bar

__all__ = ["branch", "conversion_mapping", "convert_into", "names_for", "sources_of"]

Module = TypeVar("Module", bound=nn.Module)


def conversion_mapping(model: PreTrainedModel) -> list[Any]:
    """How the model's parameters are made of what is on disk."""
    mapping: list[Any] = get_model_conversion_mapping(model)
    return mapping


def convert_into(model: PreTrainedModel, tensors: Mapping[str, Any], device: str, mapping: Any = None) -> Any:
    """Sets the parameters that `tensors` (named as on disk) convert to; gives transformers' loading info.

    With device "meta" nothing is read and nothing allocated. `mapping`: where `model` is only a part of the model whose
    conversion it is.
    """
    mapping = conversion_mapping(model) if mapping is None else mapping
    config = LoadStateDictConfig(device_map={"": torch.device(device)}, weight_mapping=mapping)
    with progress_bar(shown=False):
        info, _ = convert_and_load_state_dict_in_model(model, dict(tensors), config)
    return info


def branch(model: PreTrainedModel, name: str, leaf: nn.Module) -> PreTrainedModel:
    """A copy of a model with `leaf` in the place of its module `name`, and of all others only those around it, without
    their parameters: what `convert_into` needs to make one module, in no time even for thousands of modules.
    """
    root = _bare(model)
    here: nn.Module = root
    original: nn.Module = model
    *path, last = name.split(".")
    for part in path:
        original = original.get_submodule(part)
        inner = _bare(original)
        here._modules[part] = inner
        here = inner
    here._modules[last] = leaf
    return root


def _bare(module: Module) -> Module:
    copied = copy.copy(module)
    copied.__dict__.update(_modules={}, _parameters={}, _buffers={})
    return copied


def names_for(model: PreTrainedModel, names: Iterable[str], *prefixes: str) -> list[str]:
    """Those of `names` (as on disk) that convert to parameters whose names begin with one of `prefixes`."""
    return [name for name, target in _targets(model, names) if target.startswith(prefixes)]


def sources_of(model: PreTrainedModel, names: Iterable[str], modules: Iterable[str]) -> dict[str, list[str]]:
    """By module, those of `names` (as on disk) that convert to its parameters."""
    sources: dict[str, list[str]] = {module: [] for module in modules}
    for name, target in _targets(model, names):
        module = target
        while (module := module.rpartition(".")[0]) and module not in sources:
            pass
        if module:
            sources[module].append(name)
    return sources


def _targets(model: PreTrainedModel, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each name on disk with that of the (first) parameter it goes into."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state = model.state_dict()
    for name in names:
        yield name, rename_source_key(name, renamings, converters, model.base_model_prefix, state)[0]
