"""An operator as a third party would write it, whose constructor wants weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Doubled(nn.Module):
    """Twice the original; looks at its weights when it is built."""

    def __init__(self, key: str, gguf_loader: object, config: Any, orig_module: nn.Module) -> None:
        super().__init__()
        del gguf_loader, config
        self.orig_module = orig_module
        self.key = key
        self.scale = 2.0 * float(torch.isfinite(orig_module.get_parameter("down_proj")).all())

    def forward(self, *args: Any) -> torch.Tensor:
        return self.scale * self.orig_module(*args)
