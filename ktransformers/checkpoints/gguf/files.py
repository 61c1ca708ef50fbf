"""From what a user writes – a file, any part of a split set, a folder, a pattern – to the files of one GGUF model."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ktransformers.errors import CheckpointError

__all__ = ["find_gguf"]

# How llama.cpp's gguf-split names parts.
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
# Files that lie beside a model and are none: projectors of vision models, importance matrices, adapters.
_NO_MODEL = re.compile(r"mmproj|imatrix|\blora\b", re.IGNORECASE)


def find_gguf(name_or_path: str | os.PathLike[str]) -> list[Path] | None:
    """The files of the model, in order; None when `name_or_path` speaks of no GGUF file.

    A folder counts when it holds GGUF files and no config.json. Raises `CheckpointError` for parts that are missing and
    for a folder or a pattern that fits several models.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return None
        found = sorted(p for p in path.iterdir() if _is_gguf(p))
        return _only(found, path) if found else None
    if path.is_file():
        return _with_siblings(path) if _is_gguf(path) or _starts_as_gguf(path) else None
    if path.suffix.lower() != ".gguf":
        return None
    if any(character in path.name for character in "*?["):
        found = sorted(path.parent.glob(path.name))
        if not found:
            raise CheckpointError(f"no file fits {path}")
        return _only(found, path)
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link to {path.readlink()}, which is not there: fetch it again")
    # A part that is absent may belong to a set whose other parts are here: then that is what has to be said.
    if _PART.fullmatch(path.name) and any(path.parent.glob("*.gguf")):
        return _with_siblings(path)
    raise CheckpointError(f"there is no file {path.absolute()}{_others(path.parent)}")


def _only(found: list[Path], place: Path) -> list[Path]:
    """The one model among `found`; of a split set, all parts."""
    models: dict[str, Path] = {}
    for path in found:
        match = _PART.fullmatch(path.name)
        models.setdefault(match["stem"] if match else path.name, path)
    likely = {name: path for name, path in models.items() if not _NO_MODEL.search(name)} or models
    if len(likely) > 1:
        names = ", ".join(sorted(path.name for path in likely.values()))
        raise CheckpointError(f"{place} holds {len(likely)} GGUF models: {names}. Name one of these files")
    return _with_siblings(next(iter(likely.values())))


def _with_siblings(path: Path) -> list[Path]:
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count, width = int(match["count"]), len(match["number"])
    ending = path.name[match.end("count") :]
    parts = [
        path.with_name(f"{match['stem']}-{number:0{width}}-of-{match['count']}{ending}")
        for number in range(1, count + 1)
    ]
    absent = [part.name for part in parts if not part.is_file()]
    if absent or not parts:
        more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        raise CheckpointError(
            f"{path.parent} lacks {len(absent)} of the {count} parts of {match['stem']}: {', '.join(absent[:5])}{more}"
        )
    return parts


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and path.is_file()


def _starts_as_gguf(path: Path) -> bool:
    """Files of the Hugging Face cache and of Ollama are named by their hashes."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _others(folder: Path) -> str:
    there = sorted(path.name for path in folder.glob("*.gguf")) if folder.is_dir() else []
    return f"; {folder} holds {', '.join(there[:5])}" if there else ""
