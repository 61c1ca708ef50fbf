"""The header of one GGUF file: metadata and tensor table, checked against the file's size. No weight is read.

Format: docs/gguf.md of ggml, versions 2 and 3, little-endian. The `gguf` package's reader gives the same, some twenty
times slower on a large vocabulary, and answers a damaged file with whatever numpy says.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

from ktransformers.errors import CheckpointError

__all__ = ["GgufFile", "TensorInfo", "read_header"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_DIMENSIONS = 4  # GGML_MAX_DIMS
_LEAST_ENTRY = 24  # bytes of a tensor's entry with an empty name and no dimension


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and how. `shape` is in torch's order, slowest dimension first; `type` is ggml's name."""

    name: str
    file: Path
    type: str
    shape: tuple[int, ...]
    offset: int
    """From the beginning of the file, in bytes."""
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """One file. `problems`: what keeps its tensors from being read, as sentences."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    problems: tuple[str, ...]


def read_header(path: Path) -> GgufFile:
    """Raises `CheckpointError` for a file that is no GGUF file or whose header is damaged."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            _check_start(path, start)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, size, data)
    except (struct.error, IndexError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise CheckpointError(
            f"{path} is damaged or cut short at {size} bytes: its header cannot be read ({error}): copy it again"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _check_start(path: Path, start: bytes) -> None:
    if start[:4] != _MAGIC:
        what = "is empty" if not start else f"begins with {start[:4]!r}, not with {_MAGIC!r}"
        raise CheckpointError(f"{path} is no GGUF file: it {what}")
    (version,) = struct.unpack_from("<I", start, 4)
    if version not in _VERSIONS:
        why = "; it is written for big-endian machines" if version & 0xFFFF == 0 and version else ""
        raise CheckpointError(f"{path} is GGUF version {version}{why}; this reads versions 2 and 3, little-endian")


def _parse(path: Path, size: int, data: mmap.mmap) -> GgufFile:
    cursor = _Cursor(data, position=8)
    tensor_count, pair_count = cursor.number("Q"), cursor.number("Q")
    if tensor_count * _LEAST_ENTRY > size or pair_count > size:
        raise CheckpointError(
            f"{path} is damaged or cut short: {size} bytes cannot hold {tensor_count} tensors and {pair_count} keys"
        )
    metadata = {}
    for _ in range(pair_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"), key)
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path} is damaged: general.alignment is {alignment!r}, which is no power of two")
    entries = [cursor.tensor() for _ in range(tensor_count)]
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for name, shape, kind, offset in entries:
        if name in tensors:
            problems.append(f"{path.name} holds {name} twice")
        info = _info(path, name, shape, kind, start + offset, problems)
        if info is not None:
            tensors[name] = info
    problems += _beyond_the_end(path, size, tensors) or _misplaced(path, start, alignment, tensors)
    return GgufFile(path, metadata, tensors, tuple(problems))


def _info(
    path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, problems: list[str]
) -> TensorInfo | None:
    try:
        type_ = GGMLQuantizationType(kind)
        weights, nbytes = GGML_QUANT_SIZES[type_]
    except (ValueError, KeyError):
        problems.append(f"{name} in {path.name} has ggml type {kind}, which the gguf package does not know")
        return None
    if not shape or min(shape) < 1 or prod(shape) >= 1 << 63 or shape[-1] % weights:
        problems.append(f"{name} in {path.name} has impossible dimensions {shape} for type {type_.name}")
        return None
    return TensorInfo(name, path, type_.name, shape, offset, prod(shape) // weights * nbytes)


def _beyond_the_end(path: Path, size: int, tensors: dict[str, TensorInfo]) -> list[str]:
    beyond = [tensor.name for tensor in tensors.values() if tensor.offset + tensor.nbytes > size]
    if not beyond:
        return []
    needed = max(tensor.offset + tensor.nbytes for tensor in tensors.values())
    more = f" and {len(beyond) - 5} more" if len(beyond) > 5 else ""
    return [
        f"{path} is cut short: it has {size} of {needed} bytes, and {len(beyond)} of its {len(tensors)} tensors lie "
        f"beyond its end: {', '.join(beyond[:5])}{more}: copy it again"
    ]


def _misplaced(path: Path, start: int, alignment: int, tensors: dict[str, TensorInfo]) -> list[str]:
    """What lies where no writer puts it: the numbers there are another tensor's."""
    problems, end, before = [], start, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if (tensor.offset - start) % alignment:
            problems.append(f"{path.name} is damaged: {tensor.name} is not aligned to {alignment} bytes")
        elif tensor.offset < end:
            problems.append(f"{path.name} is damaged: {before} and {tensor.name} overlap")
        end, before = max(end, tensor.offset + tensor.nbytes), tensor.name
    return problems


class _Cursor:
    """Reads on from a position. What lies beyond the end raises struct.error."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data = data
        self.position = position

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.position)
        self.position += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        # Vocabularies hold hundreds of thousands of strings: no call is spent on any of them that can be saved.
        data, start = self._data, self.position + 8
        (length,) = _LENGTH.unpack_from(data, self.position)
        end = start + length
        if end > len(data):
            raise struct.error(f"a text of {length} bytes at {start}")
        self.position = end
        return data[start:end].decode("utf-8", "replace")

    def value(self, kind: int, key: str) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(key)
        raise struct.error(f"{key} has the unknown value type {kind}")

    def _array(self, key: str) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if count > len(self._data):  # every element takes a byte at least
            raise struct.error(f"{key} has {count} elements")
        if kind in _NUMBERS:
            code = f"<{count}{_NUMBERS[kind]}"
            values = list(struct.unpack_from(code, self._data, self.position))
            self.position += struct.calcsize(code)
            return values
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        raise struct.error(f"{key} is an array of the unknown value type {kind}")

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape in torch's order, number of the type, offset from the beginning of the data."""
        name, count = self.string(), self.number("I")
        if count > _MOST_DIMENSIONS:
            raise struct.error(f"{name} has {count} dimensions")
        fastest_first = struct.unpack_from(f"<{count}Q", self._data, self.position)
        self.position += 8 * count
        return name, fastest_first[::-1], self.number("I"), self.number("Q")


_LENGTH = struct.Struct("<Q")
