"""Where a model comes from, behind one face: a checkpoint folder, or GGUF files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ktransformers.checkpoints.decoded import DecodedFiles, open_files
from ktransformers.checkpoints.floats import FloatSource, FreedFloats
from ktransformers.checkpoints.gguf import GgufModel, GgufWeights, find_gguf, load_gguf
from ktransformers.checkpoints.headers import CheckpointFiles
from ktransformers.checkpoints.load import load_model, load_tokenizer
from ktransformers.checkpoints.locate import locate
from ktransformers.checkpoints.source import open_source
from ktransformers.experts import WeightsSource

__all__ = ["FolderOrigin", "Origin", "Weights", "open_origin"]


class Weights(Protocol):
    """The weights of a model, not read yet."""

    @property
    def streamed(self) -> bool:
        """Whether operators can read theirs while the model loads."""
        ...

    @property
    def open_source(self) -> Callable[[PreTrainedModel, Iterable[str]], WeightsSource] | None:
        """For `KTransformersConfig.open_source`; None where operators read the files that transformers finds."""
        ...

    def load(self, **kwargs: Any) -> PreTrainedModel:
        """The model, complete and in eval mode; `kwargs` as for transformers' `from_pretrained`. Raises
        `CheckpointError`, for what headers show before a weight is read.
        """
        ...


class Origin(Protocol):
    """`place`: for messages. `model`: what `build_meta_model` takes."""

    @property
    def place(self) -> Path: ...
    @property
    def model(self) -> Path | PreTrainedConfig: ...

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """None when there is none. Raises `CheckpointError` for one that cannot be read."""
        ...

    def open(self, meta: PreTrainedModel, dtype: str | torch.dtype) -> Weights:
        """The weights of `meta`, which is on the meta device, as `dtype` ("auto": as they are stored). Reads headers
        and raises `CheckpointError` for what they show.
        """
        ...

    def floats(self, build_meta: Callable[[], PreTrainedModel], names: Sequence[str]) -> FloatSource:
        """Gives the modules `names` of the model, which `build_meta` makes on the meta device, their float weights
        again.
        """
        ...


def open_origin(
    name_or_path: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
) -> Origin:
    """A folder, a model id in the local cache, or a GGUF file, any part of a split one, or a folder of them.

    Raises `CheckpointError` for what is not there, and for GGUF headers that cannot be read.
    """
    place = locate(name_or_path, cache_dir=cache_dir)
    files = find_gguf(place)
    if files is not None:
        return GgufOrigin(GgufModel.open(files))
    return FolderOrigin(place, trust_remote_code=trust_remote_code)


class FolderOrigin:
    """A folder with a config.json."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        self.place = folder
        self.model: Path | PreTrainedConfig = folder
        self._trust_remote_code = trust_remote_code

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return load_tokenizer(self.place, trust_remote_code=self._trust_remote_code)

    def open(self, meta: PreTrainedModel, dtype: str | torch.dtype) -> Weights:
        files = open_files(self.place, meta, dtype if isinstance(dtype, torch.dtype) else None)
        return _FolderWeights(self.place, meta, files, dtype, self._trust_remote_code)

    def floats(self, build_meta: Callable[[], PreTrainedModel], names: Sequence[str]) -> FloatSource:
        return FreedFloats(self.place, build_meta, names)


@dataclass(frozen=True)
class _FolderWeights:
    folder: Path
    meta: PreTrainedModel
    files: CheckpointFiles | None
    dtype: str | torch.dtype
    trust_remote_code: bool

    @property
    def streamed(self) -> bool:
        return self.files is not None

    @property
    def open_source(self) -> Callable[[PreTrainedModel, Iterable[str]], WeightsSource] | None:
        return partial(open_source, self.files) if isinstance(self.files, DecodedFiles) else None

    def load(self, **kwargs: Any) -> PreTrainedModel:
        options = {"dtype": self.dtype, "trust_remote_code": self.trust_remote_code, **kwargs}
        return load_model(self.folder, self.meta, self.files, **options)


class GgufOrigin:
    """GGUF files."""

    def __init__(self, opened: GgufModel) -> None:
        self._opened = opened
        self.place = opened.checkpoint.files[0]
        self.model: Path | PreTrainedConfig = opened.config

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._opened.tokenizer()

    def open(self, meta: PreTrainedModel, dtype: str | torch.dtype) -> Weights:
        if isinstance(dtype, str):
            dtype = self._opened.dtype if dtype == "auto" else getattr(torch, dtype)
        # What the tables here do not know, transformers' own loader reads as a whole.
        weights = None if self._opened.architecture is None else self._opened.weights(meta, dtype)
        return _GgufWeights(self._opened, weights, type(meta), dtype)

    def floats(self, build_meta: Callable[[], PreTrainedModel], names: Sequence[str]) -> FloatSource:  # noqa: ARG002
        weights = cache(lambda dtype: self._opened.weights(build_meta(), dtype))

        def fill(name: str, module: nn.Module) -> None:
            with weights(next(module.parameters()).dtype).modules([name]) as (found,):
                found.fill(module)

        return fill


@dataclass(frozen=True)
class _GgufWeights:
    opened: GgufModel
    weights: GgufWeights | None
    model_class: type[PreTrainedModel]
    dtype: torch.dtype

    @property
    def streamed(self) -> bool:
        return self.weights is not None

    @property
    def open_source(self) -> Callable[[PreTrainedModel, Iterable[str]], WeightsSource] | None:
        weights = self.weights
        return None if weights is None else lambda *_: weights

    def load(self, **kwargs: Any) -> PreTrainedModel:
        return load_gguf(self.opened, self.weights, self.model_class, dtype=self.dtype, **kwargs)
