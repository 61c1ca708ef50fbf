"""A GGUF model as transformers knows it: configuration, model on the meta device, weights looked up, tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kt_kernel import KernelError
from ktransformers.checkpoints.gguf.architectures import ARCHITECTURES, Architecture
from ktransformers.checkpoints.gguf.checkpoint import GgufCheckpoint, open_gguf
from ktransformers.checkpoints.gguf.facts import Facts
from ktransformers.checkpoints.gguf.others import load_other, other_config, other_problems, others
from ktransformers.checkpoints.gguf.tokenizer import end_tokens, load_gguf_tokenizer
from ktransformers.checkpoints.gguf.weights import GgufWeights, match_weights
from ktransformers.checkpoints.preflight import raise_if_missing
from ktransformers.checkpoints.progress import progress_bar
from ktransformers.errors import CheckpointError, KTransformersError

__all__ = ["GgufModel", "load_gguf"]

_LISTED = 20


@dataclass(frozen=True)
class GgufModel:
    """Everything about the model but its weights' numbers. `architecture` None: transformers' loader reads them."""

    checkpoint: GgufCheckpoint
    architecture: Architecture | None
    config: PreTrainedConfig

    @classmethod
    def open(cls, files: list[Path]) -> GgufModel:
        """Reads headers only. Raises `CheckpointError` that lists everything that is wrong with them."""
        checkpoint = open_gguf(files)
        architecture = ARCHITECTURES.get(checkpoint.architecture)
        if architecture is not None:
            return cls(checkpoint, architecture, _config(checkpoint, architecture))._with_dtype()
        problems = [*checkpoint.problems]
        if not checkpoint.architecture:
            problems.insert(0, "the metadata lack general.architecture")
        elif checkpoint.architecture not in others():
            known = ", ".join(sorted({*ARCHITECTURES, *others()}))
            problems.insert(0, f"architecture {checkpoint.architecture!r} is not read; architectures: {known}")
        else:
            problems += other_problems(checkpoint)
        if problems:
            raise _error(checkpoint, problems)
        return cls(checkpoint, None, other_config(checkpoint))._with_dtype()

    def _with_dtype(self) -> GgufModel:
        """The configuration as it would be in a checkpoint folder: with the type of the weights."""
        self.config.dtype = self.dtype
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Of the float weights where the user does not say: fp32 where all matrices are, else bf16, which holds the
        numbers of most F16 files too, for they were converted from it, and does not overflow as fp16 may.
        """
        matrices = {tensor.type for tensor in self.checkpoint.tensors.values() if len(tensor.shape) > 1}
        return torch.float32 if matrices <= {"F32"} else torch.bfloat16

    def weights(self, meta: PreTrainedModel, dtype: torch.dtype) -> GgufWeights:
        """Raises `CheckpointError` that lists what is missing, left over or of a wrong shape, and for an architecture
        that transformers reads as a whole.
        """
        if self.architecture is None:
            raise CheckpointError(
                f"{self.checkpoint.name} is read by transformers as a whole, single modules of it cannot be read"
            )
        found = match_weights(self.checkpoint, self.architecture, meta, dtype)
        if found.problems:
            raise _error(self.checkpoint, found.problems)
        return found

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return load_gguf_tokenizer(self.checkpoint)

    def generation_config(self) -> GenerationConfig:
        """The tokens that begin and end texts; sampling is left to the user."""
        ids: dict[str, Any] = {
            "bos_token_id": self.config.bos_token_id,
            "eos_token_id": end_tokens(self.checkpoint) or None,
            "pad_token_id": self.config.pad_token_id,
        }
        return GenerationConfig(**ids)


def load_gguf(
    opened: GgufModel,
    weights: GgufWeights | None,
    model_class: type[PreTrainedModel],
    *,
    dtype: torch.dtype,
    **kwargs: Any,
) -> PreTrainedModel:
    """The model with its weights, in eval mode; `kwargs` as for transformers' `from_pretrained`. `weights` None: as
    transformers' own GGUF loader reads them.

    Raises `CheckpointError` when a file changed since its header was read, and what operators raise.
    """
    with progress_bar():
        try:
            if weights is None:
                loaded = load_other(opened.checkpoint.files[0], model_class, dtype, **kwargs)
            else:
                given = {"config": opened.config, "state_dict": weights.state(), "dtype": dtype, **kwargs}
                loaded = model_class.from_pretrained(None, output_loading_info=True, **given)
        except (KTransformersError, KernelError):
            raise
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise CheckpointError(f"transformers cannot load {opened.checkpoint.name}: {error}") from error
    model, info = loaded
    raise_if_missing(info["missing_keys"], model, opened.checkpoint.name)
    assert isinstance(model, PreTrainedModel)
    model.config.name_or_path = model.name_or_path = opened.checkpoint.name
    model.generation_config = opened.generation_config()
    model.train(False)
    return model


def _config(checkpoint: GgufCheckpoint, architecture: Architecture) -> PreTrainedConfig:
    facts = Facts(checkpoint)
    said = architecture.config(facts)
    problems = [*checkpoint.problems, *facts.problems]
    try:
        config = AutoConfig.for_model(**said)
    except Exception as error:  # validation of transformers raises of many types
        raise _error(checkpoint, [*problems, f"the metadata make no {said['model_type']} model: {error}"]) from error
    if problems:
        raise _error(checkpoint, problems)
    assert isinstance(config, PreTrainedConfig)
    config.name_or_path = str(checkpoint.files[0])
    return config


def _error(checkpoint: GgufCheckpoint, problems: list[str]) -> CheckpointError:
    if len(problems) == 1:
        return CheckpointError(f"{checkpoint.name} cannot be loaded: {problems[0]}")
    more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
    listed = "".join(f"\n  - {problem}" for problem in [*problems[:_LISTED], *more])
    return CheckpointError(f"{checkpoint.name} cannot be loaded:{listed}")
