"""Which tensors of a file make which parameters of a model, known before a weight is read; and the parameters, each
read when it is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kt_kernel.layer_formats import LayerFormats
from kt_kernel.packed_file import Source
from ktransformers.checkpoints.gguf.architectures import Architecture, Made, TensorName
from ktransformers.checkpoints.gguf.checkpoint import GgufCheckpoint
from ktransformers.checkpoints.gguf.experts import find_experts
from ktransformers.checkpoints.gguf.header import TensorInfo
from ktransformers.checkpoints.gguf.module import ExpertsModule
from ktransformers.errors import UnsupportedModuleError
from ktransformers.experts import ExpertsSpec

__all__ = ["GgufWeights", "Parameter", "match_weights"]

_LAYER = re.compile(r"(.*\blayers)\.(\d+)\.(.+)")
# Tensors that hold no weights of the model: rotation tables, which are part of the configuration.
_NO_WEIGHTS = re.compile(r"^rope_(freqs|factors_\w+)\.weight$|\.attn_rot_embd\.")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_LISTED = 5


@dataclass(frozen=True)
class Parameter:
    """One parameter. Indexed by anything, as transformers does, it is read."""

    checkpoint: GgufCheckpoint
    tensors: tuple[TensorInfo, ...]
    made: Made
    shape: tuple[int, ...]
    config: Any
    dtype: torch.dtype

    def __getitem__(self, _: Any) -> torch.Tensor:
        # fp32 goes on as it is: transformers keeps some parameters in fp32 whatever the model's type.
        parts = [
            self.checkpoint.read(tensor, dtype=None if tensor.type == "F32" else self.dtype) for tensor in self.tensors
        ]
        whole = self.made.make(parts, self.config)
        return whole.reshape(self.shape).contiguous()

    def misfit(self) -> str | None:
        """A sentence when the tensors do not give the parameter's shape."""
        metas = [torch.empty(tensor.shape, device="meta") for tensor in self.tensors]
        try:
            made = tuple((self.made.make(metas, self.config)).shape)
        except (RuntimeError, IndexError, ValueError):
            made = None
        if made is not None and _without_ones(made) == _without_ones(self.shape):
            return None
        there = ", ".join(f"{tensor.name} {tensor.shape}" for tensor in self.tensors)
        return f"{there} cannot be made into shape {self.shape}, which the metadata ask for"


@dataclass
class GgufWeights:
    """What `match_weights` found. `problems`: what is missing, left over or of a wrong shape, as sentences."""

    checkpoint: GgufCheckpoint
    parameters: dict[str, Parameter] = field(default_factory=dict)
    experts: dict[str, ExpertsModule] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """All parameters by name, unread, as transformers' `from_pretrained(state_dict=)` takes them. It reads those
        that the model has.
        """
        state: dict[str, Any] = dict(self.parameters)
        for name, module in self.experts.items():
            state |= {f"{name}.{key}": parameter for key, parameter in module.parameters().items()}
        return state

    @property
    def place(self) -> Path:
        return self.checkpoint.files[0]

    def identity(self) -> tuple[Sequence[Source], Mapping[str, Any]]:
        """The files, and everything else about them that decides which numbers the experts hold."""
        tensors = [(name, tensor.type, tensor.shape) for name, tensor in sorted(self.checkpoint.tensors.items())]
        dtypes = sorted({str(parameter.dtype) for parameter in self.parameters.values()})
        about = {"tensors": tensors, "architecture": self.checkpoint.architecture, "dtype": dtypes}
        return [Source.of(file) for file in self.checkpoint.files], about

    def holds(self, name: str) -> bool:
        """Whether a module can be read alone: experts can."""
        return name in self.experts

    def stored_formats(self) -> dict[str, LayerFormats]:
        """By experts module, what packs its numbers as they are stored; modules of floats are left out."""
        formats = {name: module.block.formats() for name, module in self.experts.items()}
        return {name: found for name, found in formats.items() if found is not None}

    @contextmanager
    def modules(self, names: Sequence[str]) -> Iterator[Iterator[ExpertsModule]]:
        """Experts modules in the order of `names`. The disk is asked for the next one's bytes when one is begun."""
        yield (self._announced(names, place) for place in range(len(names)))

    def _announced(self, names: Sequence[str], place: int) -> ExpertsModule:
        if place + 1 < len(names):
            self.experts[names[place + 1]].block.announce()
        return self.experts[names[place]]


def match_weights(
    checkpoint: GgufCheckpoint, architecture: Architecture, model: PreTrainedModel, dtype: torch.dtype
) -> GgufWeights:
    """Looks up every parameter of `model`, which is on the meta device, and every tensor of the file."""
    found = GgufWeights(checkpoint)
    used: set[str] = set()
    missing: list[str] = []
    for name, module in model.named_modules():
        layer = _LAYER.fullmatch(name)
        if layer is None or not name.endswith(".experts"):
            continue
        try:
            spec = ExpertsSpec.from_module(module)
        except UnsupportedModuleError:
            continue
        block = f"blk.{layer[2]}"
        experts = find_experts(checkpoint, block, spec.num_experts)
        found.problems += experts.misfits(block, spec)
        found.experts[name] = ExpertsModule(experts, module, dtype)
        used.update(experts.used)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name, tensor in model.state_dict().items():
        if any(name.startswith(f"{module}.") for module in found.experts):
            continue
        place = _place(architecture.names, name)
        made, tensors = _choose(checkpoint, place)
        if made is None:
            if name not in tied:
                missing.append(" or ".join(_spelt(place)) if place else f"the tensor of {name}")
            continue
        used.update(info.name for info in tensors)
        parameter = Parameter(checkpoint, tensors, made, tuple(tensor.shape), model.config, dtype)
        found.parameters[name] = parameter
        if (misfit := parameter.misfit()) is not None:
            found.problems.append(misfit)
    if missing:
        found.problems.append(f"{_count(missing, 'tensor')} missing: {_first(missing)}")
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    left = [name for name in checkpoint.tensors if name not in used and not _is_unused(name, layers, architecture)]
    if left:
        kind = model.config.model_type
        found.problems.append(f"{_count(left, 'tensor')} that {kind} does not take: {_first(sorted(left))}")
    return found


def _place(names: Mapping[str, TensorName], parameter: str) -> list[Made]:
    """The places where the tensors of a parameter may be, each as what it is made of."""
    layer = _LAYER.fullmatch(parameter)
    block, inside = (f"blk.{layer[2]}.", layer[3]) if layer else ("", parameter)
    entry, ending = names.get(inside), ""
    if entry is None:
        module, _, leaf = inside.rpartition(".")
        entry, ending = names.get(module), f".{leaf}"
    if entry is None:
        return []
    places = entry if isinstance(entry, tuple) else (entry,)
    whole = [place if isinstance(place, Made) else Made((place + ending,), _as_it_is) for place in places]
    return [Made(tuple(block + tensor for tensor in place.tensors), place.make) for place in whole]


def _choose(checkpoint: GgufCheckpoint, places: list[Made]) -> tuple[Made | None, tuple[TensorInfo, ...]]:
    for place in places:
        if all(tensor in checkpoint.tensors for tensor in place.tensors):
            return place, tuple(checkpoint.tensors[tensor] for tensor in place.tensors)
    return None, ()


def _spelt(places: list[Made]) -> Iterator[str]:
    return (" and ".join(place.tensors) for place in places)


def _as_it_is(tensors: Any, _: Any) -> torch.Tensor:
    (tensor,) = tensors
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _is_unused(name: str, layers: int, architecture: Architecture) -> bool:
    """Tensors that are no weights of the model, among them layers behind the last one, for speculative decoding."""
    block = _BLOCK.match(name)
    ahead = block is not None and int(block[1]) >= layers
    return ahead or _NO_WEIGHTS.search(name) is not None or name.endswith(architecture.ignored or ("\0",))


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """What a shape is up to dimensions of size 1, which the converter drops."""
    return tuple(size for size in shape if size != 1)


def _count(names: list[str], noun: str) -> str:
    return f"{len(names)} {noun}{'' if len(names) == 1 else 's'}"


def _first(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
