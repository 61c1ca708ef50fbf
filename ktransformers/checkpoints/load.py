"""A transformers model from a folder, complete or not at all."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from kt_kernel import KernelError
from ktransformers.checkpoints.decoded import DecodedFiles
from ktransformers.checkpoints.headers import CheckpointFiles
from ktransformers.checkpoints.preflight import raise_if_missing, verify_complete
from ktransformers.checkpoints.progress import progress_bar
from ktransformers.checkpoints.view import indexed
from ktransformers.errors import CheckpointError, KTransformersError
from ktransformers.log import get_logger

__all__ = ["load_model", "load_tokenizer"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")

log = get_logger("checkpoints")


def load_model(
    folder: Path,
    meta_model: PreTrainedModel,
    files: CheckpointFiles | None,
    *,
    dtype: str | torch.dtype,
    trust_remote_code: bool,
    **kwargs: Any,
) -> PreTrainedModel:
    """The model of `folder` with its weights, in eval mode, on the CPU unless `kwargs` place it.

    `files`: of the folder, as `open_files` has them. Files and names are checked against `meta_model`, the same model
    on the meta device, before weights are read. Raises `CheckpointError` for everything that keeps the model from being
    whole.
    """
    # Where a quantization_config is passed, it is ours and checks the very files that transformers found.
    if files is not None and "quantization_config" not in kwargs:
        verify_complete(files, meta_model)
    with ExitStack() as stack:
        stack.enter_context(progress_bar())
        path = None if isinstance(files, DecodedFiles) else stack.enter_context(indexed(folder, files))
        if isinstance(files, DecodedFiles):
            kwargs |= {"config": meta_model.config, "state_dict": files.unread(stack)}
            dtype = files.dtype
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
    if path is None and (folder / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    model.config.name_or_path = model.name_or_path = str(folder)
    raise_if_missing(info["missing_keys"], model, str(folder))
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    return model


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
