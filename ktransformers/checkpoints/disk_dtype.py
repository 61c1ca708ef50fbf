"""The type of a checkpoint's numbers, by its files' headers."""

from __future__ import annotations

from pathlib import Path

import torch

from ktransformers.checkpoints.headers import TORCH_DTYPES, read_headers
from ktransformers.errors import CheckpointError

__all__ = ["dtype_on_disk"]

_FLOATS = ("F32", "F16", "BF16")


def dtype_on_disk(folder: Path) -> torch.dtype | None:
    """Of the first float tensor; None for a folder without readable safetensors files."""
    try:
        files = read_headers(folder)
    except CheckpointError:
        return None
    stored = (header.dtype for header in (files.tensors.values() if files is not None else ()))
    return next((TORCH_DTYPES[dtype] for dtype in stored if dtype in _FLOATS), None)
