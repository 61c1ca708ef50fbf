"""One decoded token through a model without weights: which modules it enters, and what it leaves in the cache.

Measured on the meta device rather than computed from a configuration, so that latent attention, sliding windows,
hybrids and next month's family come out right. Experts are passed by: which of them a token enters, only numbers tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ktransformers.log import get_logger

__all__ = ["CacheLayer", "DryRun", "dry_run"]

# Two lengths tell what grows with a token and what does not. Both below any window.
_TOKENS = 8

log = get_logger("forecasting")


@dataclass(frozen=True)
class CacheLayer:
    """Bytes: `fixed` whatever the length, and `per_token` up to `window` tokens (None: without end)."""

    fixed: int
    per_token: int
    window: int | None

    def nbytes(self, tokens: int) -> int:
        """At a context of so many tokens."""
        return self.fixed + self.per_token * min(tokens, self.window or tokens)


@dataclass(frozen=True)
class DryRun:
    """`entered`: ids of the modules that a decoded token goes through; `cache`: what it keeps, layer by layer."""

    entered: frozenset[int]
    cache: tuple[CacheLayer, ...]

    def cache_bytes(self, tokens: int) -> int:
        """Of all layers, for one sequence of so many tokens."""
        return sum(layer.nbytes(tokens) for layer in self.cache)


def dry_run(model: PreTrainedModel, experts: Iterable[nn.Module]) -> DryRun | None:
    """Runs `model` (on the meta device) on a few tokens; `experts` are passed by.

    None for a model that wants to see numbers, or more than a text.
    """
    entered: set[int] = set()
    with ExitStack() as stack:
        for module in experts:
            stack.enter_context(_passed_by(module))
        for module in model.modules():
            # An experts module counts as entered although its own forward is not run.
            hook = module.register_forward_pre_hook(lambda module, _: entered.add(id(module)))
            stack.callback(hook.remove)
        try:
            shorter, longer = _cache_after(model, _TOKENS), _cache_after(model, _TOKENS + 1)
        except Exception as error:  # whatever a family's code does without numbers
            log.debug("no dry run of %s: %s: %s", type(model).__name__, type(error).__name__, error)
            return None
    layers = [
        CacheLayer(least - grown * _TOKENS, grown, window)
        for (least, window), (most, _) in zip(shorter, longer, strict=True)
        for grown in [most - least]
    ]
    return DryRun(frozenset(entered), tuple(layers))


def _cache_after(model: PreTrainedModel, tokens: int) -> list[tuple[int, int | None]]:
    """Bytes and window of each layer's cache."""
    with torch.no_grad(), torch.device("meta"):
        ids = torch.zeros(1, tokens, dtype=torch.long)
        output: Any = model(input_ids=ids, use_cache=True)
    cache: Any = getattr(output, "cache", None) or output.past_key_values  # the older name warns
    return [(_bytes_of(vars(layer), set()), _window(layer)) for layer in cache.layers]


def _window(layer: Any) -> int | None:
    window = getattr(layer, "sliding_window", None)
    return window if isinstance(window, int) and window > 0 else None


def _bytes_of(value: Any, seen: set[int]) -> int:
    """Of every tensor that a layer of the cache holds, however it keeps them."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(_bytes_of(entry, seen) for entry in value.values())
    return sum(_bytes_of(entry, seen) for entry in value) if isinstance(value, (list, tuple)) else 0


@contextmanager
def _passed_by(module: nn.Module) -> Iterator[None]:
    """Lets a module give its hidden states back, in the shape that its sum over experts has."""
    module.forward = lambda hidden, *_, **__: torch.empty_like(hidden)
    try:
        yield
    finally:
        del module.__dict__["forward"]
