"""A linear layer computed by torch from the float weights, on any device."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["KLinearTorch"]


class KLinearTorch:
    """`nn.Linear`'s own arithmetic on a device of choice.

    `resident=True` keeps a copy of the weights there (none is made when they are there already); otherwise they travel
    for each call and are dropped after it.
    """

    name = "KLinearTorch"

    def __init__(self, module: nn.Linear, device: torch.device, *, resident: bool) -> None:
        self.device = device
        self._module = module
        self._resident = resident
        self._copies: dict[str, torch.Tensor] = {}

    def load(self) -> None:
        """Copies the weights to the device when they are to stay there."""
        if self._resident:
            parameters = self._module.named_parameters(recurse=False)
            self._copies = {name: p.detach().to(self.device) for name, p in parameters if self._elsewhere(p)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, K) → (…, N) on `device`, in x's dtype."""
        with torch.no_grad():
            x = x.to(self.device)
            bias = None if self._module.bias is None else self._tensor("bias").to(x.dtype)
            return functional.linear(x, self._tensor("weight").to(x.dtype), bias)

    @property
    def nbytes(self) -> int:
        """Bytes of weights this op holds besides the module's own."""
        return sum(tensor.nbytes for tensor in self._copies.values())

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._copies.get(name)
        if tensor is None:
            tensor = self._module.get_parameter(name).detach().to(self.device, non_blocking=True)
        return tensor

    def _elsewhere(self, parameter: torch.Tensor) -> bool:
        return parameter.device != torch.empty(0, device=self.device).device
