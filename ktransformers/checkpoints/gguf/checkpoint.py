"""The files of one GGUF model as a whole: metadata, tensors by name, and their numbers when they are asked for."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from kt_kernel import gguf as blocks
from kt_kernel.quantized import GroupedMatrix
from ktransformers.checkpoints.gguf.header import GgufFile, TensorInfo, read_header
from ktransformers.errors import CheckpointError

__all__ = ["GgufCheckpoint", "open_gguf"]

_EXPERTS = re.compile(r"\.ffn_(gate|up|down|gate_up)(_exps|\.\d+)\.weight$")
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def _decodes(kind: GGMLQuantizationType) -> bool:
    """Whether the gguf package does, shown by a block of zeros."""
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


@functools.cache
def _readable() -> frozenset[str]:
    """Types that are read: whatever the gguf package decodes, and plain floats."""
    return frozenset({*_PLAIN, *blocks.BLOCK_TYPES, *(kind.name for kind in gguf.GGML_QUANT_SIZES if _decodes(kind))})


@dataclass(frozen=True)
class GgufCheckpoint:
    """`problems`: everything that keeps the model from being read, as sentences; nothing is raised for them yet."""

    files: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    problems: tuple[str, ...]

    @property
    def architecture(self) -> str:
        """As the file names it; empty where it does not."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def name(self) -> str:
        """For messages: the file, or the first of several."""
        return str(self.files[0])

    @property
    def expert_types(self) -> list[str]:
        """The quantised types of experts' matrices."""
        found = {tensor.type for name, tensor in self.tensors.items() if _EXPERTS.search(name)}
        return sorted(found - _PLAIN.keys())

    def read(self, tensor: TensorInfo, index: int | None = None, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor as floats; with `index`, that part of its slowest dimension.

        dtype: bfloat16 or float32 for quantised tensors (None: float32); others come as they are stored.
        Raises `CheckpointError` when the file no longer holds it.
        """
        shape = tensor.shape if index is None else tensor.shape[1:]
        raw = self._bytes(tensor, index)
        if tensor.type in _PLAIN:
            stored = torch.from_numpy(raw).view(_PLAIN[tensor.type]).reshape(shape)
            return stored if dtype is None else stored.to(dtype)
        if tensor.type in blocks.BLOCK_TYPES:
            narrow = dtype == torch.bfloat16
            decoded = torch.from_numpy(
                blocks.dequantize(tensor.type, _rows(raw, shape), bfloat16=narrow).reshape(shape)
            )
            weights = decoded.view(torch.bfloat16) if narrow else decoded
        else:
            kind = GGMLQuantizationType[tensor.type]
            weights = torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(_rows(raw, shape), kind)))
        return weights.reshape(shape) if dtype is None else weights.reshape(shape).to(dtype)

    def unpack(self, tensor: TensorInfo, index: int | None = None) -> GroupedMatrix:
        """A matrix's own whole numbers and scales; with `index`, of that part of a stack. Its type has to be one of
        `kt_kernel.gguf.BLOCK_TYPES`.
        """
        shape = tensor.shape if index is None else tensor.shape[1:]
        return blocks.unpack(tensor.type, _rows(self._bytes(tensor, index), shape))

    def announce(self, tensor: TensorInfo) -> None:
        """Tells the disk that a tensor will be read soon, where the system has a way to."""
        if not hasattr(os, "posix_fadvise"):
            return
        with contextlib.suppress(OSError), tensor.file.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), tensor.offset, tensor.nbytes, os.POSIX_FADV_WILLNEED)

    def _bytes(self, tensor: TensorInfo, index: int | None) -> NDArray[np.uint8]:
        """Read, not mapped: mapped pages would count as this process's memory."""
        size = tensor.nbytes if index is None else tensor.nbytes // tensor.shape[0]
        raw = np.empty(size, dtype=np.uint8)
        try:
            with tensor.file.open("rb", buffering=0) as file:
                file.seek(tensor.offset + (index or 0) * size)
                view, there = memoryview(raw.data), 0
                while there < size and (step := file.readinto(view[there:])):
                    there += step
        except OSError as error:
            raise CheckpointError(f"{tensor.name} cannot be read from {tensor.file}: {error.strerror}") from error
        if there < size:
            raise CheckpointError(f"{tensor.file} has become shorter: {tensor.name} is no longer in it as a whole")
        return raw


def open_gguf(files: Sequence[Path]) -> GgufCheckpoint:
    """Reads the headers of all `files`. Raises `CheckpointError` for files that are none or whose headers are damaged;
    what else is wrong is in `problems`.
    """
    parts, broken = [], []
    for path in files:
        try:
            parts.append(read_header(path))
        except CheckpointError as error:
            broken.append(str(error))
    if broken:
        raise CheckpointError("; ".join(broken))
    problems = [problem for part in parts for problem in part.problems]
    problems += _split_problems(parts)
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                problems.append(f"{name} is in {tensors[name].file.name} and in {part.path.name}")
            tensors[name] = tensor
    problems += _unreadable_types(tensors)
    return GgufCheckpoint(tuple(files), parts[0].metadata, tensors, tuple(problems))


def _split_problems(parts: list[GgufFile]) -> list[str]:
    """Whether the files say of themselves what their names say."""
    count = parts[0].metadata.get("split.count", 0)
    if count > 1 and len(parts) == 1:
        return [
            f"{parts[0].path.name} says it is one of {count} parts, and its name does not say where the others are: "
            f"name them <model>-00001-of-{count:05}.gguf and so on"
        ]
    problems = []
    for place, part in enumerate(parts):
        said = part.metadata.get("split.count", 0 if len(parts) == 1 else None), part.metadata.get("split.no", 0)
        if len(parts) > 1 and said != (len(parts), place):
            problems.append(
                f"{part.path.name} says it is part {said[1] + 1} of {said[0]}, not {place + 1} of {len(parts)}: are "
                "these parts of the same model?"
            )
    expected = parts[0].metadata.get("split.tensors.count")
    found = sum(len(part.tensors) for part in parts)
    if expected is not None and expected != found and not any(part.problems for part in parts):
        problems.append(f"the parts of {parts[0].path.name} hold {found} tensors, not {expected}")
    return problems


def _unreadable_types(tensors: dict[str, TensorInfo]) -> list[str]:
    unreadable: dict[str, list[str]] = {}
    for tensor in tensors.values():
        if tensor.type not in _readable():
            unreadable.setdefault(tensor.type, []).append(tensor.name)
    return [
        f"type {kind} is not read ({len(names)} {'tensor' if len(names) == 1 else 'tensors'}, such as {names[0]}); "
        f"types: {', '.join(sorted(_readable()))}"
        for kind, names in sorted(unreadable.items())
    ]


def _rows(raw: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    return raw.reshape(rows, raw.size // rows)
