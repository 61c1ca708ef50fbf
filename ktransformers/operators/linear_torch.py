"""A linear layer computed by torch from the float weights, on any device."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call

__all__ = ["KLinearTorch"]


class KLinearTorch:
    """The module's own forward on a device of choice, also that of a subclass of `nn.Linear`.

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
            weights = self._copies
            if not self._resident:
                parameters = self._module.named_parameters(recurse=False)
                weights = {name: p.detach().to(self.device, non_blocking=True) for name, p in parameters}
            result: torch.Tensor = functional_call(self._module, weights, (x.to(self.device),))
            return result

    @property
    def nbytes(self) -> int:
        """Bytes of weights this op holds besides the module's own."""
        return sum(tensor.nbytes for tensor in self._copies.values())

    def _elsewhere(self, parameter: torch.Tensor) -> bool:
        return parameter.device != torch.empty(0, device=self.device).device
