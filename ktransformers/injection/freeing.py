"""Letting go of float weights that were packed, and what stands in for a module that lost them in vain."""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

import torch
from torch import nn

from ktransformers.errors import FreedModuleError

__all__ = ["FreedModule", "free_weights", "meta_tensors"]


class FreedModule(nn.Module):
    """Takes the place of a module whose weights were freed by an injection that then failed. Calling it says so."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__()
        self.name = name
        self.reason = reason

    def forward(self, *args: object, **kwargs: object) -> NoReturn:  # noqa: ARG002 – takes whatever the module took
        """Raises FreedModuleError."""
        raise FreedModuleError(f"{self.name} has no weights: {self.reason}")


def free_weights(module: nn.Module, *, keep: Collection[nn.Module] = ()) -> None:
    """Puts empty tensors on the meta device, of equal shape and dtype, in place of a module's parameters and buffers.

    `keep` are modules inside it whose weights are still needed. A tensor that somebody else holds stays alive there.
    """
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = torch.empty_like(buffer, device="meta")
    for child in module._modules.values():
        if child is not None and not any(child is kept for kept in keep):
            free_weights(child, keep=keep)


def meta_tensors(module: nn.Module) -> list[str]:
    """Names of the tensors of a module that have no values in memory."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in tensors if tensor.is_meta]
