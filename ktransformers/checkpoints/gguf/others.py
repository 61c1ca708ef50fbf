"""Architectures that transformers' own GGUF loader reads and the tables here do not. It reads one file, as a whole."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from ktransformers.checkpoints.gguf.checkpoint import GgufCheckpoint
from ktransformers.errors import CheckpointError

__all__ = ["load_other", "other_config", "other_problems", "others"]


@functools.cache
def others() -> tuple[str, ...]:
    """By `general.architecture`, in order."""
    named = {name.replace("minimax_", "minimax-") for name in GGUF_CONFIG_MAPPING.keys() - {"general", "tokenizer"}}
    try:
        from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS
    except ImportError:  # an older transformers
        return tuple(sorted(named))
    return tuple(sorted({*named, *GGUF_CONFIG_ARCHS}))


def other_problems(checkpoint: GgufCheckpoint) -> list[str]:
    """What keeps transformers from reading it, as sentences."""
    problems = []
    if len(checkpoint.files) > 1:
        problems.append(
            f"architecture {checkpoint.architecture} is read by transformers, which takes one file: join the parts "
            "with `llama-gguf-split --merge`"
        )
    if importlib.util.find_spec("accelerate") is None:
        problems.append(
            f"architecture {checkpoint.architecture} is read by transformers, which needs accelerate for GGUF files: "
            "pip install accelerate"
        )
    return problems


def other_config(checkpoint: GgufCheckpoint) -> PreTrainedConfig:
    """Raises `CheckpointError` for metadata that make no configuration."""
    file = checkpoint.files[0]
    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except Exception as error:  # of many types, for keys that are missing or of another type
        raise CheckpointError(f"transformers cannot read the metadata of {checkpoint.name}: {error!r}") from error
    assert isinstance(config, PreTrainedConfig)
    return config


def load_other(file: Path, model_class: type[PreTrainedModel], dtype: torch.dtype, **kwargs: Any) -> Any:
    """Model and loading info, as `from_pretrained(output_loading_info=True)` gives them."""
    options: dict[str, Any] = {"gguf_file": file.name, "dtype": dtype, **kwargs}
    if hasattr(transformers, "GgufConfig"):  # newer versions would keep blocks for kernels that CPUs have none of
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return model_class.from_pretrained(file.parent, local_files_only=True, output_loading_info=True, **options)
