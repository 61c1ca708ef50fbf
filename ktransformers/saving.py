"""`save_pretrained` after an injection: writes the float originals while they are there, and refuses once they are
freed.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from ktransformers.errors import CheckpointError
from ktransformers.operators.base import BaseInjectedModule

__all__ = ["guard_saving"]


def guard_saving(model: nn.Module) -> None:
    """Keeps the model from writing a checkpoint without its experts. No effect on models without `save_pretrained`."""
    if hasattr(type(model), "save_pretrained"):
        model.save_pretrained = MethodType(_save_pretrained, model)  # type: ignore[assignment]


def _save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
    freed = [m.key for m in self.modules() if isinstance(m, BaseInjectedModule) and not m.has_float_weights]
    if freed:
        raise CheckpointError(
            f"save_pretrained is not supported after this injection: the float weights of {len(freed)} modules, first "
            f"{freed[0]}, were freed when they were packed. Keep the checkpoint the model came from, or inject with "
            "keep_float=True."
        )
    return type(self).save_pretrained(self, *args, **kwargs)
