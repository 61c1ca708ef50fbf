"""The experts of one block: where each projection of each expert lies, and its numbers in either form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kt_kernel.gguf import BLOCK_TYPES
from kt_kernel.layer_formats import LayerFormats
from kt_kernel.quantized import GroupedMatrix
from ktransformers.checkpoints.gguf.checkpoint import GgufCheckpoint
from ktransformers.checkpoints.gguf.grids import Grid, common_grid, on_grid, packed_format
from ktransformers.checkpoints.gguf.header import TensorInfo
from ktransformers.experts import ExpertsSpec

__all__ = ["PROJECTIONS", "BlockExperts", "ExpertTensor", "GroupedExperts", "find_experts"]

PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class ExpertTensor:
    """One projection of one expert: rows of a part of a tensor. `part` None: the tensor as a whole."""

    tensor: TensorInfo
    part: int | None
    rows: slice

    @property
    def shape(self) -> tuple[int, ...]:
        stored = self.tensor.shape if self.part is None else self.tensor.shape[1:]
        return (len(range(*self.rows.indices(stored[0]))), *stored[1:])


@dataclass(frozen=True)
class BlockExperts:
    """matrices: by projection, one entry an expert. biases: by projection, (E, channels)."""

    checkpoint: GgufCheckpoint
    matrices: dict[str, list[ExpertTensor]]
    biases: dict[str, TensorInfo]

    @property
    def types(self) -> dict[str, str]:
        """ggml's name of each projection's type; of the first expert's where they differ."""
        return {projection: experts[0].tensor.type for projection, experts in self.matrices.items()}

    @property
    def used(self) -> Iterator[str]:
        """The names of all tensors."""
        yield from {entry.tensor.name for experts in self.matrices.values() for entry in experts}
        yield from (tensor.name for tensor in self.biases.values())

    def announce(self) -> None:
        """Tells the disk that all of it will be read soon."""
        entries = {entry.tensor.name: entry.tensor for experts in self.matrices.values() for entry in experts}
        for tensor in entries.values():
            self.checkpoint.announce(tensor)

    def floats(self, projection: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """(channels, inputs)."""
        entry = self.matrices[projection][expert]
        return self.checkpoint.read(entry.tensor, entry.part, dtype=dtype)[entry.rows]

    def grids(self) -> dict[str, Grid] | None:
        """By projection, the grid on which all experts' numbers lie as they are stored; gate and up share one. None
        where some are floats or of types that have no grid.
        """
        first, second = self._types()
        if not first | second <= BLOCK_TYPES.keys():
            return None
        found = {"gate": common_grid(first), "up": common_grid(first), "down": common_grid(second)}
        return {projection: found[projection] for projection in self.matrices}

    def formats(self) -> LayerFormats | None:
        """What packs all of it without changing a number; None where `grids()` is."""
        grids, (first, second) = self.grids(), self._types()
        if grids is None:
            return None
        return LayerFormats(packed_format(grids["up"], first), packed_format(grids["down"], second))

    def _types(self) -> tuple[set[str], set[str]]:
        """Of gate and up, and of down."""
        types = {p: {entry.tensor.type for entry in experts} for p, experts in self.matrices.items()}
        return types.get("gate", set()) | types["up"], types["down"]

    def grouped(self, projection: str, expert: int, grid: Grid) -> GroupedMatrix:
        """The numbers that are stored, on a grid of `grids()`."""
        entry = self.matrices[projection][expert]
        whole = self.checkpoint.unpack(entry.tensor, entry.part)
        minimums = None if whole.minimums is None else whole.minimums[entry.rows]
        rows = GroupedMatrix(whole.values[entry.rows], whole.scales[entry.rows], whole.group, whole.levels, minimums)
        return on_grid(rows, grid)

    def bias(self, projection: str) -> torch.Tensor:
        """float32 (E, channels)."""
        return self.checkpoint.read(self.biases[projection], dtype=torch.float32)

    def misfits(self, block: str, spec: ExpertsSpec) -> Iterator[str]:
        """What does not have the model's sizes, as sentences."""
        matrix = (spec.intermediate_dim, spec.hidden_dim)
        for projection, experts in self.matrices.items():
            wanted = matrix if projection != "down" else matrix[::-1]
            wrong = next((entry for entry in experts if entry.shape != wanted), None)
            if len(experts) != spec.num_experts:
                yield f"{experts[0].tensor.name} holds {len(experts)} experts, the model has {spec.num_experts}"
            elif wrong is not None:
                yield f"{wrong.tensor.name} has experts of shape {wrong.shape}, the model's have {wanted}"
            if spec.has_bias and projection in self.biases:
                expected = (spec.num_experts, wanted[0])
                if self.biases[projection].shape != expected:
                    yield f"{self.biases[projection].name} has shape {self.biases[projection].shape}, not {expected}"
        lost = set(PROJECTIONS if spec.has_gate else PROJECTIONS[1:]) - self.matrices.keys()
        yield from (f"{block}.ffn_{projection}_exps.weight is missing" for projection in sorted(lost))
        if spec.has_bias:
            lost = self.matrices.keys() - self.biases.keys()
            yield from (f"{block}.ffn_{projection}_exps.bias is missing" for projection in sorted(lost))


def find_experts(checkpoint: GgufCheckpoint, block: str, experts: int) -> BlockExperts:
    """The experts of `block` ("blk.3") in any of the ways in which files hold them: a stack a projection; gate and up
    in one stack, gate's rows first, as llama.cpp writes and reads it; or a tensor an expert, in files of before April
    2024.
    """
    tensors = checkpoint.tensors
    matrices: dict[str, list[ExpertTensor]] = {}
    for projection in PROJECTIONS:
        stacked = tensors.get(f"{block}.ffn_{projection}_exps.weight")
        single = [tensors.get(f"{block}.ffn_{projection}.{expert}.weight") for expert in range(experts)]
        if stacked is not None:
            matrices[projection] = _parts(stacked, slice(None))
        elif found := [tensor for tensor in single if tensor is not None]:
            matrices[projection] = [ExpertTensor(tensor, None, slice(None)) for tensor in found]
    both = tensors.get(f"{block}.ffn_gate_up_exps.weight")
    if both is not None and len(both.shape) == 3:
        half = both.shape[1] // 2
        matrices |= {"gate": _parts(both, slice(0, half)), "up": _parts(both, slice(half, None))}
    named = {projection: tensors.get(f"{block}.ffn_{projection}_exps.bias") for projection in PROJECTIONS}
    biases = {projection: tensor for projection, tensor in named.items() if tensor is not None}
    return BlockExperts(checkpoint, matrices, biases)


def _parts(tensor: TensorInfo, rows: slice) -> list[ExpertTensor]:
    return [ExpertTensor(tensor, expert, rows) for expert in range(tensor.shape[0])] if len(tensor.shape) == 3 else []


class GroupedExperts(Sequence[GroupedMatrix]):
    """One projection of all experts, each unpacked when it is taken."""

    def __init__(self, experts: BlockExperts, projection: str, grid: Grid) -> None:
        self._experts = experts
        self._projection = projection
        self._grid = grid

    def __len__(self) -> int:
        return len(self._experts.matrices[self._projection])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._experts.grouped(self._projection, index, self._grid)
