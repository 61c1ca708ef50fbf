"""A linear layer on the CPU kernel: packed weights, and the way its input and result travel."""

from __future__ import annotations

import torch
from torch import nn

from kt_kernel import LinearWrapper

__all__ = ["KLinearCPU"]


class KLinearCPU:
    """Runs on `kt_kernel.LinearWrapper`. Packed weights are read-only, so copies of the operator share this object."""

    name = "KLinearCPU"

    def __init__(
        self, module: nn.Linear, *, backend: str | None, rotate: bool, threads: int | None, strict: bool
    ) -> None:
        self.wrapper = LinearWrapper(
            module.in_features, module.out_features, backend=backend, rotate=rotate, threads=threads, strict=strict
        )

    def load(self, module: nn.Linear) -> None:
        """Quantises and packs the module's weights."""
        self.wrapper.load_weights(module.weight, module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, K) on any device → (…, N) on the CPU, in x's dtype."""
        result: torch.Tensor = self.wrapper.forward(x.detach().cpu())
        return result
