"""`save_pretrained` after an injection: writes the float originals while they are there, and refuses once they are
freed.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedModel

from ktransformers.errors import CheckpointError
from ktransformers.operators.base import BaseInjectedModule

__all__ = ["guard_saving"]


_save: Any = PreTrainedModel.save_pretrained


def guard_saving() -> None:
    """Keeps transformers' models from writing a checkpoint without their experts.

    On the class, once: the experts that were freed may lie in a part of the model, or the model be a part of another,
    and an instance is to be what it was after `undo`.
    """
    PreTrainedModel.save_pretrained = _save_pretrained  # type: ignore[method-assign]


@functools.wraps(_save)
def _save_pretrained(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    freed = [m.key for m in self.modules() if isinstance(m, BaseInjectedModule) and not m.has_float_weights]
    if freed:
        raise CheckpointError(
            f"save_pretrained is not supported after this injection: the float weights of {len(freed)} modules, first "
            f"{freed[0]}, were freed when they were packed. Keep the checkpoint the model came from, or inject with "
            "keep_float=True."
        )
    return _save(self, *args, **kwargs)
