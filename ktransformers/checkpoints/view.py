"""A checkpoint folder as transformers wants to find it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ktransformers.checkpoints.headers import CheckpointFiles

__all__ = ["indexed"]

_STANDARD = ("model.safetensors", "model.safetensors.index.json")


@contextmanager
def indexed(folder: Path, files: CheckpointFiles | None) -> Iterator[Path]:
    """`folder` itself, or where its safetensors files have other names and no index, a folder of links to it with one.

    transformers loads a single `model.safetensors`, or what an index lists, and nothing else.
    """
    if files is None or any((folder / name).is_file() for name in _STANDARD):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="ktransformers-") as name:
        view = Path(name)
        for entry in folder.iterdir():
            (view / entry.name).symlink_to(entry.absolute())
        index = {tensor: header.file.name for tensor, header in files.tensors.items()}
        text = json.dumps({"metadata": {}, "weight_map": index})
        (view / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        yield view
