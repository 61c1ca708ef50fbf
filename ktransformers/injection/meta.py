"""A model's module tree without its weights, for matching rules in about a second."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from ktransformers.checkpoints.gguf import GgufModel, find_gguf
from ktransformers.errors import CheckpointError

__all__ = ["build_meta_model", "load_config"]

_DOORS = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel)


def build_meta_model(
    source: str | os.PathLike[str] | PreTrainedConfig, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model of a configuration with every tensor on the meta device. No weight file is opened.

    Args:
        source: a model folder, a GGUF file, a model id in the local cache, or a configuration.
        trust_remote_code: as in transformers, for models that bring their own code.

    Raises:
        CheckpointError: there is no configuration, it is damaged, or transformers knows no such model.
    """
    config = (
        source if isinstance(source, PreTrainedConfig) else load_config(source, trust_remote_code=trust_remote_code)
    )
    with torch.device("meta"), no_init_weights():
        for door in _DOORS:
            try:
                return _open(door, config, trust_remote_code)
            except ValueError as error:
                if "Unrecognized configuration class" not in str(error):
                    raise CheckpointError(
                        f"the configuration of {config.model_type} builds no model: {error}"
                    ) from error
            except Exception as error:
                why = f"{error} is not known" if isinstance(error, KeyError) else error
                raise CheckpointError(f"the configuration of {config.model_type} builds no model: {why}") from error
    raise CheckpointError(f"transformers has no model for the configuration type {config.model_type!r}")


def load_config(source: str | os.PathLike[str], *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Reads a configuration from a folder, a GGUF file or the local cache; the network is not asked.

    Raises CheckpointError.
    """
    if (files := find_gguf(source)) is not None:
        return GgufModel.open(files).config
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, JSONDecodeError, …
        lines = str(error).splitlines() or [type(error).__name__]
        reason = " ".join(line.strip() for line in (lines[:2] if lines[0].endswith(":") else lines[:1]))
        raise CheckpointError(
            f"no readable configuration for {os.fspath(source)!r}: it is neither a folder with a sound config.json nor "
            f"a model in the local cache ({reason})"
        ) from error
    assert isinstance(config, PreTrainedConfig)
    return config


def _open(door: Any, config: PreTrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    model = door.from_config(config, trust_remote_code=trust_remote_code)
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    return model
