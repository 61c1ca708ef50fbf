"""What the safetensors files of a checkpoint say they hold, and whether they are whole. Reads headers, never
weights.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kt_kernel.packed_file import Source, is_packed
from ktransformers.errors import CheckpointError

__all__ = ["TORCH_DTYPES", "CheckpointFiles", "ReadRows", "TensorHeader", "Unread", "read_files", "read_headers"]

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names of types that this version reads."""
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7 and later; MXFP4's scales are stored as U8 too
    TORCH_DTYPES["F8_E8M0"] = torch.float8_e8m0fnu

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LENGTH = struct.Struct("<Q")
_LARGEST_HEADER = 100_000_000  # the limit of the format's own reader
_SAMPLE = 64  # bytes that tell what a file without a header is


ReadRows = Callable[[str, slice], torch.Tensor]
"""Reads rows of a tensor by its name on disk; slice(None) is all of it."""


@dataclass(frozen=True)
class Unread:
    """Rows of a tensor on disk, read when transformers indexes it."""

    read: ReadRows
    name: str
    rows: slice = field(default_factory=lambda: slice(None))

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self.read(self.name, self.rows)


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as a file's header has it; `dtype` in the format's spelling, such as BF16."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointFiles:
    """The tensors of a checkpoint by their names on disk."""

    folder: Path
    tensors: dict[str, TensorHeader]

    def sources(self) -> tuple[Source, ...]:
        """The files as they are now: name, size and time of change."""
        return tuple(Source.of(file) for file in sorted({header.file for header in self.tensors.values()}))

    def digest(self) -> str:
        """Of what the headers say: names, types and shapes, and the file of each tensor."""
        entries = ((n, h.file.name, h.dtype, h.shape) for n, h in sorted(self.tensors.items()))
        return hashlib.sha256(repr(list(entries)).encode()).hexdigest()

    def opened(self, stack: ExitStack) -> ReadRows:
        """Files are opened when they are needed, and closed by `stack`.

        They are read, not mapped: mapped pages would count as this process's memory until the file is closed.
        """
        handles: dict[Path, Any] = {}
        # Closed in the place of this call: after what the caller enters next, such as a thread that reads.
        files = stack.enter_context(ExitStack())

        def rows(name: str, wanted: slice) -> torch.Tensor:
            path = self.tensors[name].file
            if path not in handles:
                handles[path] = files.enter_context(safe_open(path, framework="pt", device="cpu", backend="pread"))
            whole = wanted == slice(None)  # a number without dimensions has no rows
            tensor: torch.Tensor = handles[path].get_tensor(name) if whole else handles[path].get_slice(name)[wanted]
            return tensor

        return rows


def read_headers(folder: Path) -> CheckpointFiles | None:
    """The tensors of the safetensors files of `folder`: of `model.safetensors`, else of those the index names, else of
    all there are. None when it keeps its weights in another format.

    Raises `CheckpointError` for a shard that is missing or cut short, for tensors of the index that no shard holds, and
    without an index for tensors that two files hold.
    """
    if (folder / _SINGLE).is_file():
        return read_files([folder / _SINGLE])
    if not (folder / _INDEX).is_file():
        if unlisted := sorted(folder.glob("*.safetensors")):
            return _read_without_index(unlisted)
        if any(folder.glob("*.bin")):
            return None
        raise CheckpointError(f"{folder} holds no weights: neither {_SINGLE} nor {_INDEX}{_unfinished(folder)}")
    index = _read_index(folder / _INDEX)
    names = sorted(set(index.values()))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{folder} lacks {len(absent)} of its {len(names)} weight files: {_first(absent)}{_unfinished(folder)}"
        )
    files = read_files([folder / name for name in names])
    tensors = files.tensors
    lost = sorted(name for name in index if name not in tensors)
    if lost:
        raise CheckpointError(
            f"{len(lost)} of the {len(index)} tensors in {folder / _INDEX} are in no file: {_first(lost)}"
        )
    return files


def read_files(paths: Sequence[Path]) -> CheckpointFiles:
    """The tensors of safetensors files; of two that hold the same the last counts, as it does for transformers. Raises
    `CheckpointError` for a file that is cut short or damaged.
    """
    return CheckpointFiles(paths[0].parent, {n: header for path in paths for n, header in _file_headers(path).items()})


def _read_without_index(paths: Sequence[Path]) -> CheckpointFiles:
    _file_headers(paths[0])  # before a file that cannot be read is asked more
    if is_packed(paths[0]):
        raise CheckpointError(
            f"{paths[0].parent} holds experts that were packed by `kt convert`, and no other weights: load the "
            "checkpoint they were made of, with this folder as weights_path"
        )
    seen: dict[str, Path] = {}
    for path in paths:
        for name in _file_headers(path):
            if name in seen:
                raise CheckpointError(
                    f"{seen[name]} and {path} both hold {name}, and no index says which of them counts: remove one"
                )
            seen[name] = path
    return read_files(paths)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no index of weights: {error!r}") from error
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path} is no index of weights: its weight_map is a {type(weight_map).__name__}")
    return weight_map


def _file_headers(path: Path) -> dict[str, TensorHeader]:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            start = file.read(_LENGTH.size)
            length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
            if not 0 < length <= min(_LARGEST_HEADER, size - _LENGTH.size):
                raise CheckpointError(_no_header(path, size, start + file.read(_SAMPLE)))
            text = file.read(length)
    except OSError as error:
        if path.is_symlink() and not path.exists():
            raise CheckpointError(
                f"{path} is a link to {path.readlink()}, which is not there: its download was not finished or was "
                "cleaned up, fetch it again"
            ) from error
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        end = _LENGTH.size + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        tensors = {name: TensorHeader(path, entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} is damaged: its header cannot be read ({error!r})") from error
    if size < end:
        raise CheckpointError(
            f"{path} is cut short: its header asks for {end} bytes, the file has {size}: copy it again"
        )
    return tensors


def _no_header(path: Path, size: int, start: bytes) -> str:
    """What a file without a header is instead, as far as its first bytes tell."""
    if start.startswith(b"version https://git-lfs"):
        return f"{path} is damaged: it is a git-lfs pointer to weights, not the weights: run `git lfs pull` there"
    if start.lstrip().startswith(b"<"):
        return f"{path} is damaged: it is a web page, such as a download that was refused leaves: fetch it again"
    if size == 0:
        return f"{path} is cut short: it has 0 bytes: fetch it again"
    return f"{path} is damaged or cut short: {size} bytes, and no whole header in them: fetch it again"


def _unfinished(folder: Path) -> str:
    """A hint at downloads that were not finished, in the folder or where `hf download` keeps them."""
    parts = [*folder.glob("*.incomplete"), *folder.glob(".cache/huggingface/download/*.incomplete")]
    return f" ({len(parts)} unfinished downloads lie there: fetch it again)" if parts else ""


def _first(names: list[str], count: int = 5) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
