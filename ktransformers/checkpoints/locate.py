"""From what a user writes – a path, or a model id in the local cache – to a folder or a GGUF file. The network is never
asked.
"""

from __future__ import annotations

import os
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import CacheNotFound, HFValidationError, LocalEntryNotFoundError

from ktransformers.checkpoints.gguf.files import find_gguf
from ktransformers.errors import CheckpointError
from ktransformers.hints import nearest

__all__ = ["locate"]


def locate(name_or_path: str | os.PathLike[str], *, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder of a checkpoint, or the first file of a GGUF model, as an absolute path: freed floats are read again
    later, when the program may have changed its folder.

    A file or folder of that name wins over a model id. Ids are looked up in the local Hugging Face cache
    (`cache_dir`, or HF_HOME) only.
    Raises `CheckpointError` that says what was looked for, and names that are near.
    """
    if not os.fspath(name_or_path):
        raise CheckpointError("the name of the model is empty: give its folder, or a model id in the local cache")
    path = Path(name_or_path).expanduser()
    if (files := find_gguf(path)) is not None:
        return files[0].absolute()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(
                f"{path} is a folder without a config.json, so it is no model checkpoint{_files_hint(path)}"
            )
        return path.absolute()
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file, and no GGUF file: give the folder that holds config.json and the weights"
        )
    name = os.fspath(name_or_path)
    try:
        snapshot = Path(
            huggingface_hub.snapshot_download(
                name, cache_dir=None if cache_dir is None else Path(cache_dir), local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, HFValidationError, CacheNotFound, FileNotFoundError) as error:
        cache = Path(cache_dir) if cache_dir is not None else Path(huggingface_hub.constants.HF_HUB_CACHE)
        raise CheckpointError(
            f"there is no model {name!r}: no folder {_spelled_out(path)}, and no such model id in the cache {cache}"
            f"{_near(name, cache)}. Nothing is downloaded here: fetch it first, e.g. with `hf download {name}`."
        ) from error
    files = find_gguf(snapshot)
    return (snapshot if files is None else files[0]).absolute()


def _spelled_out(path: Path) -> Path:
    try:
        return path.absolute()
    except FileNotFoundError:  # the folder this process stands in was removed
        return path


def _near(name: str, cache: Path) -> str:
    parent = Path(name).expanduser().parent
    folders = [str(p) for p in sorted(parent.glob("*/"))] if parent.is_dir() else []
    cached = [p.name.removeprefix("models--").replace("--", "/") for p in sorted(cache.glob("models--*"))]
    close = nearest(name, [*folders, *cached])
    return f"; near: {', '.join(close)}" if close else ""


def _files_hint(folder: Path) -> str:
    inner = sorted(p.parent.name for p in folder.glob("*/config.json"))
    return f" (its folder {inner[0]} has one)" if inner else ""
