"""A transformers model from a folder, complete or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kt_kernel import KernelError
from ktransformers.checkpoints.headers import read_headers
from ktransformers.checkpoints.preflight import raise_if_missing, verify_complete
from ktransformers.checkpoints.progress import progress_bar
from ktransformers.checkpoints.view import indexed
from ktransformers.errors import CheckpointError, KTransformersError
from ktransformers.log import get_logger

__all__ = ["is_quantized", "load_model", "load_tokenizer"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")

log = get_logger("checkpoints")


def load_model(
    folder: Path, meta_model: PreTrainedModel, *, dtype: str | torch.dtype, trust_remote_code: bool, **kwargs: Any
) -> PreTrainedModel:
    """The model of `folder` with its weights, in eval mode, on the CPU unless `kwargs` place it.

    Files and names are checked against `meta_model`, the same model on the meta device, before weights are read. Raises
    `CheckpointError` for everything that keeps the model from being whole.
    """
    files = read_headers(folder)
    # A quantised checkpoint holds other tensors than the plain model has parameters; transformers alone knows which.
    # Where one is passed, it is ours and checks the very files that transformers found.
    if files is not None and "quantization_config" not in kwargs and not is_quantized(meta_model):
        verify_complete(files, meta_model)
    with progress_bar(), indexed(folder, files) as path:
        try:
            loaded: Any = type(meta_model).from_pretrained(
                path,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **kwargs,
            )
        except (KTransformersError, KernelError):
            raise
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"transformers cannot load {folder}: {error}") from error
    model, info = loaded
    model.config.name_or_path = model.name_or_path = str(folder)
    raise_if_missing(info["missing_keys"], model, str(folder))
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    return model


def is_quantized(model: PreTrainedModel) -> bool:
    """Whether the configuration says that the checkpoint holds quantised weights, which transformers alone can read."""
    return getattr(model.config, "quantization_config", None) is not None


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer of `folder`, or None when it has none. Raises `CheckpointError` for one that cannot be read."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        log.info("%s has no tokenizer: text can neither be read nor written, token ids can", folder)
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises bare Exception on files newer than itself
        raise CheckpointError(f"the tokenizer of {folder} cannot be read: {error}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer
