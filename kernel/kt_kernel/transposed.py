"""Experts that are saved transposed, gate_up (E, H, 2I) and down (E, I, H), turned as the kernel takes them.

Nothing is copied but the slices that are read. How gate and up lie in one another no shape shows: it is known for the
models that are saved this way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from kt_kernel.checkpoint import Entry
from kt_kernel.errors import WeightsError
from kt_kernel.naming import BIAS, Layer

__all__ = ["is_interleaved", "upright"]

# By model_type: whether the channels of gate and up come in turns, else one half each (transformers' modeling files).
_INTERLEAVED = {"gpt_oss": True, "llama4": False, "llama4_text": False, "openai_privacy_filter": False}


def is_interleaved(model_type: str) -> bool:
    return _INTERLEAVED.get(model_type, False)


def upright(layer: Layer, model_type: str) -> Layer:
    """The layer itself where it is not transposed.

    Raises `WeightsError` for a transposed layer of a model that is not known to be saved so.
    """
    both, down = layer.stacked.get("gate_up"), layer.stacked.get("down")
    if both is None or down is None or not _is_transposed(both.shape, down.shape):
        return layer
    if model_type not in _INTERLEAVED:
        raise WeightsError(
            f"{layer.label}: gate_up_proj {both.shape} and down_proj {down.shape} are saved transposed, which is read "
            f"of {', '.join(_INTERLEAVED)}; the model_type of config.json is {model_type or 'not there'!r}"
        )
    turned = Layer(layer.prefix, {"down": _turned(down)})
    if (bias := layer.stacked.get("down" + BIAS)) is not None:
        turned.stacked["down" + BIAS] = bias
    fused = {"gate_up": _turned(both)}
    if (bias := layer.stacked.get("gate_up" + BIAS)) is not None:
        fused["gate_up" + BIAS] = bias
    for projection, entry in fused.items():
        if _INTERLEAVED[model_type]:
            suffix = projection.removeprefix("gate_up")
            once = _latest(entry.fetch)  # gate and up are two views of one slice
            turned.stacked["gate" + suffix] = _every_second(entry, once, 0)
            turned.stacked["up" + suffix] = _every_second(entry, once, 1)
        else:
            turned.stacked[projection] = entry
    return turned


def _is_transposed(gate_up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """(E, H, 2I) and (E, I, H). No sizes make this of (E, 2I, H) and (E, H, I) too."""
    return len(gate_up) == len(down) == 3 and gate_up[1] == down[2] and gate_up[2] == 2 * down[1]


def _turned(entry: Entry) -> Entry:
    experts, rows, columns = entry.shape
    return replace(entry, shape=(experts, columns, rows), fetch=lambda expert: entry.fetch(expert).mT)


def _every_second(entry: Entry, fetch: Callable[[int | None], Any], first: int) -> Entry:
    experts, channels, *rest = entry.shape
    return replace(entry, shape=(experts, channels // 2, *rest), fetch=lambda expert: fetch(expert)[first::2])


def _latest(fetch: Callable[[int | None], Any]) -> Callable[[int | None], Any]:
    return lru_cache(maxsize=1)(fetch)
