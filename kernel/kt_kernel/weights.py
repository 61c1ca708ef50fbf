"""Checks one layer's experts against the config and packs them, expert by expert."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_kernel import _ext
from kt_kernel.arrays import FLOATS, Array
from kt_kernel.checkpoint import Entry, open_dictionary, open_path
from kt_kernel.config import MoEConfig
from kt_kernel.errors import WeightsError, translated
from kt_kernel.naming import Layer, find_layer

__all__ = ["ExpertWeights", "open_weights", "pack"]

_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "gate_up": "gate_up_proj"}


@dataclass(frozen=True)
class ExpertWeights:
    """One layer's experts, checked: complete, of the config's shapes, one float dtype."""

    layer: Layer
    config: MoEConfig
    dtype: str

    def expert(self, index: int) -> tuple[Array, Array, Array]:
        """gate (I, H), up (I, H), down (H, I) of one expert, read now."""
        size = self.config.intermediate_size
        down = self._read("down", index)
        if self._has("gate_up"):
            both = self._read("gate_up", index)
            return both.rows(0, size), both.rows(size, 2 * size), down
        return self._read("gate", index), self._read("up", index), down

    def _has(self, projection: str) -> bool:
        return projection in self.layer.stacked or (projection, 0) in self.layer.single

    def _read(self, projection: str, expert: int) -> Array:
        if projection in self.layer.stacked:
            return self.layer.stacked[projection].array(expert)
        return self.layer.single[projection, expert].array(None)


@contextmanager
def open_weights(
    source: Mapping[str, Any] | str | os.PathLike[str], config: MoEConfig, prefix: str | None = None
) -> Iterator[ExpertWeights]:
    """The experts of a dictionary, a safetensors file or a folder, closed at the end. Raises `WeightsError`."""
    with ExitStack() as stack:
        if isinstance(source, Mapping):
            where, entries = "the weights dictionary", open_dictionary(source)
        elif isinstance(source, (str, os.PathLike)):
            where, entries = os.fspath(source), open_path(Path(source), stack)
        else:
            raise WeightsError(f"weights are a dictionary of arrays or a path, not {type(source).__name__}")
        layer = find_layer(entries, where, prefix)
        yield ExpertWeights(layer, config, _check(layer, config))


def _check(layer: Layer, config: MoEConfig) -> str:
    """The common dtype. Raises `WeightsError` for what is missing, too much, misshapen or of another type."""
    _check_complete(layer, config)
    for projection, entry in layer.stacked.items():
        _check_shape(entry, (config.expert_num, *_shape(projection, config)))
    for (projection, _), entry in layer.single.items():
        _check_shape(entry, _shape(projection, config))
    entries = [*layer.stacked.values(), *layer.single.values()]
    for entry in entries:
        if entry.dtype not in FLOATS:
            raise WeightsError(f"{entry.name} in {entry.where} is {entry.dtype}; the kernel packs {', '.join(FLOATS)}")
    dtypes = {entry.dtype: entry.name for entry in entries}
    if len(dtypes) > 1:
        found = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
        raise WeightsError(f"{layer.label}: the projections have to be of one dtype; {found}")
    return next(iter(dtypes))


def _shape(projection: str, config: MoEConfig) -> tuple[int, int]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    return {
        "gate": (intermediate, hidden),
        "up": (intermediate, hidden),
        "down": (hidden, intermediate),
        "gate_up": (2 * intermediate, hidden),
    }[projection]


def _check_shape(entry: Entry, expected: tuple[int, ...]) -> None:
    if entry.shape == expected:
        return
    text = f"{entry.name} in {entry.where} has shape {entry.shape}; the config makes it {expected}"
    if entry.shape == (*expected[:-2], expected[-1], expected[-2]):
        text += "; the last two dimensions are swapped: pass the transposed view, it is not copied"
    raise WeightsError(text)


def _check_complete(layer: Layer, config: MoEConfig) -> None:
    if layer.stacked and layer.single:
        raise WeightsError(
            f"{layer.label}: some projections are one tensor for all experts ({', '.join(layer.stacked)}), others one "
            f"tensor for each ({next(iter(layer.single.values())).name}, …): pass one layout"
        )
    present = set(layer.stacked) or {projection for projection, _ in layer.single}
    wanted = {"gate_up", "down"} if "gate_up" in present else {"gate", "up", "down"}
    if extra := sorted(_NAMES[name] for name in present - wanted):
        raise WeightsError(f"{layer.label}: gate_up_proj and also {', '.join(extra)}: pass one of the two forms")
    if layer.stacked:
        missing = [_NAMES[name] for name in sorted(wanted - present)]
        total = len(wanted)
    else:
        beyond = sorted({expert for _, expert in layer.single if expert >= config.expert_num})
        if beyond:
            raise WeightsError(
                f"{layer.label} has expert {beyond[-1]}; the config's expert_num is {config.expert_num}, "
                f"so the last is {config.expert_num - 1}"
            )
        expected = [(name, expert) for expert in range(config.expert_num) for name in sorted(wanted)]
        missing = [f"{expert}.{_NAMES[name]}" for name, expert in expected if (name, expert) not in layer.single]
        total = len(expected)
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        first = ", ".join(missing[:5])
        raise WeightsError(f"{layer.label}: {len(missing)} of {total} tensors are missing: {first}{more}")


def pack(weights: ExpertWeights, context: _ext.Context, tier: str, format: str, rotate: bool) -> _ext.PackedExperts:
    """Quantises and lays out every expert. Between two experts Ctrl-C is heard.

    Raises `WeightsError` that names the expert, the projection and the place of a weight that is NaN or infinite.
    """
    config = weights.config
    packed = _ext.PackedExperts(config.expert_num, config.hidden_size, config.intermediate_size, format, rotate)
    for index in range(config.expert_num):
        gate, up, down = weights.expert(index)
        with translated(f"{weights.layer.label}, expert {index}"):
            packed.pack_expert(
                context,
                tier,
                index,
                gate.address,
                (gate.strides[0], gate.strides[1]),
                up.address,
                (up.strides[0], up.strides[1]),
                down.address,
                (down.strides[0], down.strides[1]),
                weights.dtype,
            )
    return packed
