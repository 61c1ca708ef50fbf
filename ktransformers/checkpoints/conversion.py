"""transformers' own conversion from names and layouts on disk to a model's parameters, run on any dictionary of
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
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

__all__ = ["convert_into", "names_for"]


def convert_into(model: PreTrainedModel, tensors: Mapping[str, Any], device: str) -> Any:
    """Sets the parameters that `tensors` (named as on disk) convert to; gives transformers' loading info.

    With device "meta" nothing is read and nothing allocated.
    """
    mapping: Any = get_model_conversion_mapping(model)
    config = LoadStateDictConfig(device_map={"": torch.device(device)}, weight_mapping=mapping)
    with progress_bar(shown=False):
        info, _ = convert_and_load_state_dict_in_model(model, dict(tensors), config)
    return info


def names_for(model: PreTrainedModel, names: Mapping[str, Any], *prefixes: str) -> list[str]:
    """Those of `names` (as on disk) that convert to parameters whose names begin with one of `prefixes`."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state = model.state_dict()

    def target(name: str) -> str:
        return rename_source_key(name, renamings, converters, model.base_model_prefix, state)[0]

    return [name for name in names if target(name).startswith(prefixes)]
