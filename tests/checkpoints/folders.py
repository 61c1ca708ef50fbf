"""Tiny checkpoints on disk, and ways to damage them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests import models


def make_checkpoint(folder: Path, build: Callable[..., Any] = models.make_qwen3_moe, **overrides: Any) -> Path:
    """A saved model with its tokenizer."""
    return models.save_with_tokenizer(build(**overrides), folder)


def rewrite(folder: Path, change: Callable[[str], str | None]) -> None:
    """Renames tensors on disk, or drops those that `change` maps to None."""
    path = folder / "model.safetensors"
    tensors = {new: t for name, t in load_file(path).items() if (new := change(name)) is not None}
    save_file(tensors, path, metadata={"format": "pt"})
