"""How a module's tensors on disk fall into parts of a few experts, so that no layer has to be in memory as floats."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ktransformers.checkpoints.headers import TensorHeader

__all__ = ["Part", "Split", "common_start", "split_experts"]

PART_BYTES = 8 << 20
"""Floats of a part. Reading one takes up to three times as much for a moment (tensors as on disk, stacked,
concatenated) while another is packed. Small, so that memory is used again instead of asked for; large enough that what
transformers does around a conversion, about a millisecond, is nothing beside the reading."""

_NUMBER = re.compile(r"(\d+)(?=\.)")


@dataclass(frozen=True)
class Part:
    """Experts [first, last) of a module's `experts`, and the tensors on disk they are made of.

    `sliced` ones hold all experts, and only these rows of them are read. `last` None: the module as a whole.
    """

    tensors: tuple[str, ...]
    first: int = 0
    last: int | None = None
    experts: int = 0
    sliced: frozenset[str] = frozenset()

    def is_sliced(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter of this part's skeleton has one row an expert."""
        return self.last is not None and _is_stacked(tuple(parameter.shape), self.last - self.first)

    def skeleton(self, module: nn.Module) -> nn.Module:
        """A copy of a module on the meta device with room for this part's experts."""
        copied = copy.deepcopy(module)
        if self.last is None:
            return copied
        for name, parameter in copied._parameters.items():
            if parameter is not None and _is_stacked(tuple(parameter.shape), self.experts):
                rows = torch.empty(self.last - self.first, *parameter.shape[1:], dtype=parameter.dtype, device="meta")
                copied._parameters[name] = nn.Parameter(rows, requires_grad=False)
        return copied


@dataclass(frozen=True)
class Split:
    """A module's tensors on disk by the expert they belong to. Neither: those that all experts share."""

    experts: int
    single: Mapping[int, Sequence[str]]
    stacked: frozenset[str]
    shared: tuple[str, ...]

    def part(self, first: int, last: int) -> Part:
        single = (name for expert in range(first, last) for name in self.single.get(expert, ()))
        names = (*single, *sorted(self.stacked), *self.shared)
        return Part(names, first, last, self.experts, self.stacked)

    def parts(self, bytes_per_expert: int) -> list[Part]:
        """Parts of as many experts as `PART_BYTES` has room for, one at least."""
        step = max(1, PART_BYTES // max(1, bytes_per_expert))
        return [self.part(first, min(first + step, self.experts)) for first in range(0, self.experts, step)]


def split_experts(module: nn.Module, names: Sequence[str], tensors: Mapping[str, TensorHeader]) -> Split | None:
    """`names` are the tensors on disk that `module` is made of. None where they do not fall into experts."""
    experts = _expert_count(module)
    if experts < 2:
        return None
    common = len(common_start(names))
    single: dict[int, list[str]] = {}
    stacked, shared = set(), []
    for name in names:
        number = _NUMBER.match(name[common:])
        if number is not None:
            single.setdefault(int(number[1]), []).append(name)
        elif _is_stacked(tensors[name].shape, experts):
            stacked.add(name)
        else:
            shared.append(name)
    if single and sorted(single) != list(range(experts)):
        return None
    if not single and not stacked:
        return None
    return Split(experts, single, frozenset(stacked), tuple(shared))


def common_start(names: Sequence[str]) -> str:
    """What all names begin with, up to and with its last dot."""
    first, last = min(names), max(names)
    same = next((i for i, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return first[: first.rfind(".", 0, same) + 1]


def _expert_count(module: nn.Module) -> int:
    """The leading size of the module's stacked matrices; 0 for a module without."""
    return next((p.shape[0] for p in module._parameters.values() if p is not None and p.dim() == 3), 0)


def _is_stacked(shape: tuple[int, ...], experts: int) -> bool:
    return len(shape) >= 2 and shape[0] == experts
