"""The type of a checkpoint's numbers, by its files' headers."""

from __future__ import annotations

from pathlib import Path

import torch

from ktransformers.checkpoints.headers import read_headers
from ktransformers.errors import CheckpointError

__all__ = ["dtype_on_disk"]

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dtype_on_disk(folder: Path) -> torch.dtype | None:
    """Of the first float tensor; None for a folder without readable safetensors files."""
    try:
        files = read_headers(folder)
    except CheckpointError:
        return None
    found = (_FLOATS.get(header.dtype) for header in (files.tensors.values() if files is not None else ()))
    return next((dtype for dtype in found if dtype is not None), None)
