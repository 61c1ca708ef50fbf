"""Modules' float weights, read again from the checkpoint after they were freed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ktransformers.checkpoints.decoded import open_files
from ktransformers.checkpoints.source import CheckpointSource
from ktransformers.errors import CheckpointError

__all__ = ["FloatSource", "FloatsOf", "FreedFloats"]

FloatSource = Callable[[str, nn.Module], None]
"""Gives the module of that name its float parameters again, in the dtype that they have."""

FloatsOf = Callable[[Sequence[str]], FloatSource]
"""The `FloatSource` of these modules. Looks for nothing yet: the floats may all be in memory."""

_State = tuple[int, int] | None


class FreedFloats:
    """A `FloatSource` of a checkpoint folder. Which tensors make which module is looked up once (with thousands of
    them that takes longer than to read a layer), and again when files are no longer what they were.
    """

    def __init__(self, folder: Path, build_meta: Callable[[], PreTrainedModel], names: Sequence[str]) -> None:
        """`build_meta`: gives the checkpoint's model on the meta device, new each time. `names`: the modules that may
        be asked for.
        """
        self._folder, self._build_meta, self._names = folder, build_meta, names
        self._opened: tuple[torch.dtype, CheckpointSource, dict[Path, _State]] | None = None

    def __call__(self, name: str, module: nn.Module) -> None:
        """Raises `CheckpointError` when the files no longer hold all of the module's parameters."""
        with self._source(next(module.parameters()).dtype).modules([name]) as (weights,):
            weights.fill(module)

    def _source(self, dtype: torch.dtype) -> CheckpointSource:
        if self._opened is not None:
            known, source, states = self._opened
            if known == dtype and all(_state(file) == state for file, state in states.items()):
                return source
        twin = self._build_meta()
        files = open_files(self._folder, twin, dtype)
        if files is None:
            raise CheckpointError(
                f"{self._folder} is no checkpoint of safetensors that is read here, so the weights of "
                f"{self._names[0]} cannot be read again"
            )
        for name in self._names:
            twin.get_submodule(name).to(dtype)
        source = CheckpointSource(files, twin, self._names)
        states = {file: _state(file) for file in {header.file for header in files.tensors.values()}}
        self._opened = dtype, source, states
        return source


def _state(file: Path) -> _State:
    """Bytes and time of change; None when it is not there."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
