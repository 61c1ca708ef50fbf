"""One experts module of a model, read from the experts of a block of a GGUF file."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from kt_kernel.checkpoint import LazyStack
from ktransformers.checkpoints.gguf.experts import PROJECTIONS, BlockExperts, GroupedExperts
from ktransformers.experts import ExpertsSpec, layer_weights, weight_shapes

__all__ = ["ExpertsModule"]

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
        """The experts as floats, as `kt_kernel.MoEWrapper.load_weights` takes them, each read when it is packed."""
        shapes = weight_shapes(spec)
        stored = {entry.tensor.type for experts in self.block.matrices.values() for entry in experts}
        # What is stored as floats of one type is packed from those; everything else from fp32, so that quantised
        # weights are rounded once.
        dtype = _FLOATS[stored.pop()] if len(stored) == 1 and stored <= _FLOATS.keys() else torch.float32
        given = {}
        for projection in self.block.matrices:
            read = partial(self.block.floats, projection, dtype=dtype)
            given[f"{projection}_proj"] = LazyStack(shapes[f"{projection}_proj"], _name(dtype), read)
            if spec.has_bias:
                bias = self.block.bias(projection).to(dtype)
                given[f"{projection}_proj_bias"] = LazyStack(
                    shapes[f"{projection}_proj_bias"], _name(dtype), bias.__getitem__
                )
        return given

    def quantized(self, spec: ExpertsSpec) -> Mapping[str, Any] | None:
        """The experts in the file's own whole numbers and scales, each read when it is packed; None where it has
        floats, or types that have none.
        """
        grids = self.block.grids()
        if grids is None:
            return None
        given: dict[str, Any] = {f"{p}_proj": GroupedExperts(self.block, p, grid) for p, grid in grids.items()}
        if spec.has_bias:
            given |= {f"{p}_proj_bias": self.block.bias(p).numpy() for p in grids}
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
