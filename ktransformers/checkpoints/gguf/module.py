"""One experts module of a model, read from the experts of a block of a GGUF file."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ktransformers.checkpoints.gguf.experts import PROJECTIONS, BlockExperts, GroupedExperts
from ktransformers.experts import ExpertsSpec, layer_weights

__all__ = ["ExpertsModule"]


class ExpertsModule:
    """skeleton: the model's module, on the meta device; it stays there. dtype: of its parameters when they are read."""

    def __init__(self, experts: BlockExperts, skeleton: nn.Module, dtype: torch.dtype) -> None:
        self.block = experts
        self._skeleton = skeleton
        self._dtype = dtype

    def fill(self, module: nn.Module) -> None:
        """Gives `module` every parameter with its float values, whatever its layout."""
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=self._dtype)
            module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        views = layer_weights(module, ExpertsSpec.from_module(module))
        for projection in PROJECTIONS:
            matrices, biases = getattr(views, projection), getattr(views, f"{projection}_bias")
            if matrices is not None:
                for expert in range(len(matrices)):
                    matrices[expert] = self.block.floats(projection, expert, self._dtype)
            if biases is not None:
                biases.copy_(self.block.bias(projection))

    def experts(self, spec: ExpertsSpec) -> Mapping[str, Any]:
        """The experts as `kt_kernel.MoEWrapper.load_weights` takes them, each read when it is packed: in the file's own
        whole numbers and scales where it has such, else as floats.
        """
        given: dict[str, Any] = {}
        for projection, matrices in self.block.matrices.items():
            if matrices[0].is_grouped:
                given[f"{projection}_proj"] = GroupedExperts(self.block, projection)
            else:
                given[f"{projection}_proj"] = [
                    self.block.floats(projection, expert, self._dtype) for expert in range(spec.num_experts)
                ]
            if projection in self.block.biases:
                given[f"{projection}_proj_bias"] = self.block.bias(projection)
        return given

    def parameters(self) -> dict[str, Any]:
        """The module's parameters by name, read when they are indexed: all of them together, each handed out once."""
        once = _ReadOnce(self)
        return {name: once.parameter(name) for name, _ in self._skeleton.named_parameters(recurse=False)}

    def filled(self) -> dict[str, torch.Tensor]:
        module = copy.deepcopy(self._skeleton)
        self.fill(module)
        return {name: parameter.data for name, parameter in module.named_parameters(recurse=False)}


class _ReadOnce:
    """transformers takes parameters one by one, from several threads."""

    def __init__(self, module: ExpertsModule) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._ready: dict[str, torch.Tensor] = {}

    def parameter(self, name: str) -> Any:
        return _Indexed(partial(self._take, name))

    def _take(self, name: str) -> torch.Tensor:
        with self._lock:
            if name not in self._ready:
                self._ready = self._module.filled()
            return self._ready.pop(name)


class _Indexed:
    def __init__(self, read: Any) -> None:
        self._read = read

    def __getitem__(self, _: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._read()
        return tensor
