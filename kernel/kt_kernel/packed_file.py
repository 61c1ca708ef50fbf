"""Packed layers on disk: one safetensors file each, the bytes the kernel works on, and in the metadata what they are.

The file's one tensor is `<prefix>.packed`, uint8 (experts, bytes_per_expert). It is written and read here without
a copy of the whole; any safetensors reader opens it too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kt_kernel import _ext
from kt_kernel.errors import WeightsError
from kt_kernel.layer_formats import LayerFormats
from kt_kernel.naming import choose_prefix

__all__ = [
    "PackedLayer",
    "Source",
    "find_packed",
    "is_packed",
    "map_packed",
    "open_packed",
    "read_packed",
    "save_packed",
]

FORMAT_VERSION = 3
PARTIAL = ".partial"
"""Ends the name of a file that is being written."""
_MARK = "kt_format"
_LARGEST_HEADER = 1 << 20
_HASHED = 1 << 16  # a checkpoint of 200 files is known in some milliseconds
_AGAIN = "convert the checkpoint again with this version's convert_cpu_weights.py"


@dataclass(frozen=True)
class Source:
    """A file that weights came from, as it was then: name, bytes, time of change in ns, and the SHA-256 of its ends,
    `_HASHED` bytes each: the header with all names and shapes, or most of it, and weights.
    """

    name: str
    size: int
    modified: int
    sha256: str

    @classmethod
    def of(cls, file: Path) -> Source:
        status = file.stat()
        digest = hashlib.sha256()
        with file.open("rb") as content:
            digest.update(content.read(_HASHED))
            content.seek(max(0, status.st_size - _HASHED))
            digest.update(content.read(_HASHED))
        return cls(file.name, status.st_size, status.st_mtime_ns, digest.hexdigest())

    @property
    def copy(self) -> tuple[int, str]:
        """What a copy of the file has in common with it."""
        return self.size, self.sha256


@dataclass(frozen=True)
class PackedLayer:
    """What a packed file holds; all of it stands in the file's metadata."""

    prefix: str
    experts: int
    hidden: int
    intermediate: int
    formats: LayerFormats
    rotated: bool
    gated: bool
    biased: bool
    bytes_per_expert: int
    sources: tuple[Source, ...] = ()

    @classmethod
    def of(cls, packed: _ext.PackedExperts, prefix: str, sources: Sequence[Source] = ()) -> PackedLayer:
        return cls(
            prefix,
            packed.experts,
            packed.hidden,
            packed.intermediate,
            LayerFormats.of(packed),
            packed.rotated,
            packed.gated,
            packed.biased,
            packed.bytes_per_expert,
            tuple(sources),
        )

    @property
    def tensor(self) -> str:
        return f"{self.prefix}.packed" if self.prefix else "packed"

    @property
    def nbytes(self) -> int:
        return self.experts * self.bytes_per_expert

    @property
    def header(self) -> bytes:
        """The file's beginning: the length, and the JSON padded so that the data starts at a multiple of 64."""
        described = json.dumps({key: value for key, value in asdict(self).items() if key != "prefix"}, sort_keys=True)
        metadata = {
            _MARK: str(FORMAT_VERSION),
            "layout": str(_ext.LAYOUT_VERSION),
            "prefix": self.prefix,
            "layer": described,
        }
        shape = [self.experts, self.bytes_per_expert]
        tensor = {"dtype": "U8", "shape": shape, "data_offsets": [0, self.nbytes]}
        text = json.dumps({"__metadata__": metadata, self.tensor: tensor}).encode()
        text += b" " * (-(8 + len(text)) % 64)
        return len(text).to_bytes(8, "little") + text

    @property
    def file_size(self) -> int:
        return len(self.header) + self.nbytes


def save_packed(path: Path, packed: _ext.PackedExperts, prefix: str, sources: Sequence[Source] = ()) -> None:
    """Writes the file under a temporary name beside `path`, then renames it: `path` is whole or not there."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            file.write(PackedLayer.of(packed, prefix, sources).header)
            file.write(packed.bytes())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # of a write; it does not say where
            error.filename = str(path)
        partial.unlink(missing_ok=True)
        raise


def is_packed(path: Path) -> bool:
    """Whether `path` begins as a packed file of any version does; False for everything else, damaged files too."""
    header = _header(path)
    return header is not None and _MARK in header["__metadata__"]


def open_packed(path: Path) -> PackedLayer:
    """What a packed file holds, checked against its length. Raises `WeightsError` that says what to do."""
    header = _header(path)
    if header is None or _MARK not in header["__metadata__"]:
        raise WeightsError(f"{path} is not a file of packed experts; convert_cpu_weights.py makes them")
    metadata = header["__metadata__"]
    for key, name, ours in ((_MARK, "file format", FORMAT_VERSION), ("layout", "layout", _ext.LAYOUT_VERSION)):
        if metadata.get(key) != str(ours):
            raise WeightsError(f"{path} has {name} {metadata.get(key)}; this version reads {ours}: {_AGAIN}")
    try:
        fields = json.loads(metadata["layer"])
        sources = tuple(Source(**source) for source in fields.pop("sources"))
        formats = LayerFormats.from_dict(fields.pop("formats"))
        layer = PackedLayer(prefix=metadata["prefix"], formats=formats, sources=sources, **fields)
        if not all(type(size) is int and size > 0 for size in (layer.experts, layer.bytes_per_expert)):
            raise ValueError(f"{layer.experts} experts of {layer.bytes_per_expert} bytes")
        written = layer.header
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WeightsError(f"{path}: its metadata are damaged ({error!r}): {_AGAIN}") from error
    with path.open("rb") as file:
        if file.read(len(written)) != written:
            raise WeightsError(f"{path}: its header and its metadata contradict each other: {_AGAIN}")
    size = path.stat().st_size
    if size != layer.file_size:
        what = "truncated" if size < layer.file_size else "too long"
        raise WeightsError(f"{path} is {what}: {size} bytes where its header makes it {layer.file_size}; {_AGAIN}")
    return layer


def read_packed(path: Path, layer: PackedLayer) -> _ext.PackedExperts:
    """The packed experts, copied from the file expert by expert."""
    sizes = layer.experts, layer.hidden, layer.intermediate
    try:
        packed = layer.formats.allocate(*sizes, rotate=layer.rotated, gated=layer.gated, biased=layer.biased)
    except _ext.KernelError as error:
        raise WeightsError(f"{path}: {error}: {_AGAIN}") from error
    _check_expert_size(path, layer, packed)
    buffer = bytearray(layer.bytes_per_expert)
    with path.open("rb") as file:
        file.seek(len(layer.header))
        for expert in range(layer.experts):
            if file.readinto(buffer) != len(buffer):
                raise WeightsError(f"{path} became shorter while it was read, at expert {expert}: {_AGAIN}")
            packed.load_expert(expert, buffer)
    return packed


def map_packed(path: Path, layer: PackedLayer) -> _ext.PackedExperts:
    """The packed experts where they lie in the file. Nothing is read now, and processes that map it share its pages.

    The file must not be cut short while it is in use; it may be deleted or replaced by another of its name.
    """
    sizes = layer.experts, layer.hidden, layer.intermediate
    kind = {"rotate": layer.rotated, "gated": layer.gated, "biased": layer.biased}
    try:
        packed = layer.formats.map(str(path), len(layer.header), *sizes, **kind)
    except _ext.KernelError as error:
        of_the_file = str(error).startswith(str(path))  # else of the layout that its metadata ask for
        raise WeightsError(str(error) if of_the_file else f"{path}: {error}: {_AGAIN}") from error
    _check_expert_size(path, layer, packed)
    return packed


def _check_expert_size(path: Path, layer: PackedLayer, packed: _ext.PackedExperts) -> None:
    if packed.bytes_per_expert != layer.bytes_per_expert:
        raise WeightsError(
            f"{path}: an expert of its sizes takes {packed.bytes_per_expert} bytes, not {layer.bytes_per_expert}: "
            f"{_AGAIN}"
        )


def find_packed(path: Path, prefix: str | None = None) -> tuple[Path, PackedLayer] | None:
    """The packed file at `path`, or the one of a folder that `prefix` chooses; None where nothing is packed.

    Raises `WeightsError` for a damaged file, a folder that mixes packed and float weights, and a prefix that fits none.
    """
    path = path.expanduser()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    packed = [file for file in files if is_packed(file)]
    if not packed:
        return None
    if others := [file.name for file in files if file not in packed]:
        raise WeightsError(
            f"{path} holds packed experts ({packed[0].name}, …) and also files that are not ({', '.join(others[:5])}): "
            "keep them in two folders, or pass one file"
        )
    found: dict[str, tuple[Path, PackedLayer]] = {}
    for file in packed:
        layer = open_packed(file)
        if layer.prefix in found:
            raise WeightsError(f"{found[layer.prefix][0]} and {file} both hold {layer.prefix!r}: remove one of them")
        found[layer.prefix] = file, layer
    return found[choose_prefix(found, "no packed file", str(path), prefix)]


def _header(path: Path) -> dict[str, Any] | None:
    """The JSON header of a safetensors file with metadata, or None."""
    if path.suffix != ".safetensors" and not path.name.endswith(PARTIAL):
        return None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= _LARGEST_HEADER:
            return None
        text = file.read(length)
    if _MARK.encode() not in text:  # spares parsing the header of every float file
        return None
    try:
        header = json.loads(text)
    except ValueError:
        return None
    return header if isinstance(header, dict) and isinstance(header.get("__metadata__"), dict) else None
