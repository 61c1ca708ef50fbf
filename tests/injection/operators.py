"""Operators as a third party would write them, to see what the injector does with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ktransformers.operators.base import BaseInjectedModule


class PassThrough(nn.Module):
    """Knows nothing of this package beyond how it is built; computes with the original."""

    def __init__(
        self, *, key: str, gguf_loader: object, config: Any, orig_module: nn.Module, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.key, self.gguf_loader, self.config, self.scale = key, gguf_loader, config, scale
        self.orig_module = orig_module

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.scale * self.orig_module(*args, **kwargs)


class Packing(BaseInjectedModule):
    """Copies the weights in `load`, as a packing operator does, and needs the original no more."""

    loaded: ClassVar[list[str]] = []
    fail_at: ClassVar[dict[str, BaseException]] = {}

    def __init__(
        self, key: str, gguf_loader: object, config: Any, orig_module: nn.Module, backend: str = "auto"
    ) -> None:
        super().__init__(key, gguf_loader, config, orig_module)
        self.backend = backend

    @classmethod
    def check(cls, *, key: str, orig_module: nn.Module, config: Any, kwargs: Mapping[str, Any]) -> list[str]:  # noqa: ARG003
        problems = [] if hasattr(orig_module, "down_proj") else [f"{key} is no experts module"]
        if kwargs.get("backend", "auto") not in ("auto", "INT8"):
            problems.append(f"no backend {kwargs['backend']!r}; there are auto, INT8")
        return problems

    def load(self) -> None:
        if self.key in self.fail_at:
            raise self.fail_at[self.key]
        self.packed = {name: tensor.detach().clone() for name, tensor in self.orig_module.named_parameters()}
        self.loaded.append(self.key)

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(self.orig_module, self.packed, (hidden, ids, weights))

    def describe(self) -> dict[str, str]:
        return {"op": "Packing", "backend": self.backend, "bytes": "1"}
