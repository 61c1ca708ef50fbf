"""Where an operator's weights come from while a model loads: the seam between readers of checkpoints and operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from ktransformers.experts.spec import ExpertsSpec

__all__ = ["ModuleWeights", "WeightsSource"]


class ModuleWeights(Protocol):
    """The weights of one module, not read yet. A reader of another kind of file implements this and nothing else."""

    def fill(self, module: nn.Module) -> None:
        """Gives `module`, of the model's class and on the meta device, every parameter with its float values."""
        ...

    def experts(self, spec: ExpertsSpec) -> Mapping[str, Any]:
        """The experts of `spec` as `kt_kernel.MoEWrapper.load_weights` takes them, each read when it is packed.

        To be used once, in ascending order of experts.
        """
        ...

    def quantized(self, spec: ExpertsSpec) -> Mapping[str, Any] | None:
        """The same in the numbers that are stored: a matrix of `kt_kernel.quantized` for each expert and projection,
        read when it is packed, and biases. None for a source of floats.
        """
        ...


class WeightsSource(Protocol):
    """The weights of a model's modules, read while it loads."""

    def holds(self, name: str) -> bool:
        """Whether the module of that name can be read alone; all others are transformers' to load."""
        ...

    def modules(self, names: Sequence[str]) -> AbstractContextManager[Iterator[ModuleWeights]]:
        """The modules' weights, to be used in this order and each of them once."""
        ...
