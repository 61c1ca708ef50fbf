"""A quantised checkpoint as the floats that it means: the same names, shapes and reading as a float checkpoint's.

What of the model is no experts is decoded for transformers this way, and experts where an operator asks for floats.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from kt_kernel import WeightsError
from kt_kernel.checkpoint import Entry
from kt_kernel.packed_file import Source
from kt_kernel.sources import Parts, Scheme, as_numpy, is_read, scheme_for
from kt_kernel.sources.experts import OF_ACTIVATIONS, find_quantized
from ktransformers.checkpoints.headers import (
    TORCH_DTYPES,
    CheckpointFiles,
    ReadRows,
    TensorHeader,
    Unread,
    read_headers,
)
from ktransformers.errors import CheckpointError
from ktransformers.log import warn_once

__all__ = ["DecodedFiles", "decoded", "open_files"]

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class DecodedFiles(CheckpointFiles):
    """`tensors` are the weights as floats of `dtype`; `raw` the files as they are."""

    raw: CheckpointFiles
    scheme: Scheme
    said: str
    """The checkpoint's quantization_config, as JSON."""
    dtype: torch.dtype
    members: Mapping[str, Mapping[str, str]] = field(repr=False)
    """By decoded weight, its parts' names on disk."""

    def sources(self) -> tuple[Source, ...]:
        return self.raw.sources()

    def digest(self) -> str:
        return f"{self.raw.digest()} as {self.dtype} by {self.said}"

    def opened(self, stack: ExitStack) -> ReadRows:
        read = self.raw.opened(stack)
        whole = slice(None)

        def rows(name: str, wanted: slice) -> torch.Tensor:
            parts = self.members.get(name)
            if parts is None:
                return read(name, wanted)
            shape = self.tensors[name].shape
            if len(shape) == 2:
                tensors = {part: as_numpy(read(on_disk, whole)) for part, on_disk in parts.items()}
                return self._decode(name, tensors)[wanted]
            stacked = {part: as_numpy(read(on_disk, wanted)) for part, on_disk in parts.items()}
            count = len(range(*wanted.indices(shape[0])))
            made = torch.empty(count, *shape[1:], dtype=self.dtype)
            for expert in range(count):  # stored (channels, inputs), and transformers has them transposed
                made[expert] = self._decode(name, {part: array[expert] for part, array in stacked.items()}).T
            return made

        return rows

    def unread(self, stack: ExitStack) -> dict[str, Unread]:
        """Every tensor by its name, for transformers to read what it takes."""
        read = self.opened(stack)
        return {name: Unread(read, name) for name in self.tensors}

    def matrices(self, names: Iterable[str], read: ReadRows, *, interleaved: bool) -> Mapping[str, Any] | None:
        """The experts that the decoded weights `names` make, as `kt_kernel.MoEWrapper.load_weights` takes quantised
        ones, each read by `read` and decoded when it is packed.

        interleaved: a stored gate_up has the channels of gate and up in turns. None where they are not all stored
        quantised, or come as floats (reordered inputs).
        """
        parts = [on_disk for name in names for on_disk in self.members.get(name, {"": name}).values()]
        layers = find_quantized([_entry(self.raw, name, read) for name in parts], self.scheme)
        if len(layers) != 1:
            return None
        (layer,) = layers.values()
        if {entry.name for entry in layer.entries} != set(parts):
            return None
        try:
            found = layer.matrices(interleaved)
            first = [value[0] for name, value in found.items() if not name.endswith("_bias")]
        except WeightsError as error:
            raise CheckpointError(f"{self.folder}: {error}") from error
        return None if any(isinstance(weight, np.ndarray) for weight in first) else found

    def _decode(self, name: str, tensors: Mapping[str, Any]) -> torch.Tensor:
        try:
            weight = self.scheme.decode(Parts(name, tensors))
        except WeightsError as error:
            raise CheckpointError(f"{self.folder}: {error}") from error
        values = weight if isinstance(weight, np.ndarray) else weight.dequantize()
        return torch.from_numpy(values).to(self.dtype)


def open_files(folder: Path, meta_model: PreTrainedModel, dtype: torch.dtype | None = None) -> CheckpointFiles | None:
    """The tensors of a checkpoint as floats, those of a quantised one in `dtype` (None: the configuration's, or bf16).

    `meta_model` is then one without quantisation: its configuration loses what it says of it. None for a checkpoint
    that transformers alone can read: other files than safetensors, a quantisation that is not read here.

    Raises `CheckpointError` for a quantisation that neither reads.
    """
    files = read_headers(folder)
    said = getattr(meta_model.config, "quantization_config", None)
    if files is None or said is None:
        return files
    config = said if isinstance(said, Mapping) else said.to_dict()
    if not is_read(config) and _transformers_reads(config):
        return None
    own = meta_model.config.dtype
    view = decoded(files, config, dtype or (own if isinstance(own, torch.dtype) else torch.bfloat16))
    if not view.members:
        warn_once(  # the forecast and the loader both come here
            f"{folder}: config.json says that the weights are quantised ({config.get('quant_method')}), and all "
            "tensors are floats: they are read so"
        )
    del meta_model.config.quantization_config
    return view


def decoded(files: CheckpointFiles, quantization_config: Mapping[str, Any], dtype: torch.dtype) -> DecodedFiles:
    """The view of `files` that a model without quantisation loads, its decoded weights in `dtype`.

    Raises `CheckpointError` for a quantisation that is not read.
    """
    try:
        scheme = scheme_for(quantization_config)
    except WeightsError as error:
        raise CheckpointError(f"{files.folder}: {error}") from error
    members: dict[str, dict[str, str]] = {}
    for name in files.tensors:
        if (split := _split(name, scheme)) is not None:
            members.setdefault(split[0], {})[split[1]] = name
    tensors = {name: header for name, header in files.tensors.items() if not name.endswith(OF_ACTIVATIONS)}
    made = {}
    for weight, parts in members.items():
        shape = scheme.shape({part: files.tensors[name].shape for part, name in parts.items()})
        if shape is None:
            continue
        first = files.tensors[next(iter(parts.values()))]
        stacked = "blocks" in parts and len(files.tensors[parts["blocks"]].shape) == 4
        full = (files.tensors[parts["blocks"]].shape[0], shape[1], shape[0]) if stacked else shape
        for name in parts.values():
            del tensors[name]
        tensors[weight] = TensorHeader(first.file, _DTYPE_NAMES[dtype], full)
        made[weight] = parts
    said = json.dumps(dict(quantization_config), sort_keys=True, default=str)
    return DecodedFiles(files.folder, tensors, files, scheme, said, dtype, made)


def _transformers_reads(quantization_config: Mapping[str, Any]) -> bool:
    """What transformers does not know it takes for floats, with a warning."""
    method = quantization_config.get("quant_method")
    if method is None:  # as early bitsandbytes checkpoints have it
        return bool(quantization_config.get("load_in_4bit") or quantization_config.get("load_in_8bit"))
    name = str(getattr(method, "value", method))
    return any(known == name or known.startswith(f"{name}_") for known in AUTO_QUANTIZER_MAPPING)


def _entry(files: CheckpointFiles, name: str, read: ReadRows) -> Entry:
    def fetch(expert: int | None) -> torch.Tensor:
        return read(name, slice(None)) if expert is None else read(name, slice(expert, expert + 1))[0]

    header = files.tensors[name]
    return Entry(name, header.shape, header.dtype, str(header.file), fetch)


def _split(name: str, scheme: Scheme) -> tuple[str, str] | None:
    """`…up_proj.qweight` → (`…up_proj.weight`, `qweight`), `…gate_up_proj_blocks` → (`…gate_up_proj`, `blocks`)."""
    stem, _, part = name.rpartition(".")
    if part in scheme.parts:
        return f"{stem}.weight", part
    stem, _, part = name.rpartition("_")
    return (stem, part) if part in scheme.parts else None
