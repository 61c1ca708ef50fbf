"""Finds the experts of one layer among named tensors, whatever prefix and layout they were saved with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kt_kernel.checkpoint import Entry
from kt_kernel.errors import WeightsError, did_you_mean

__all__ = ["Layer", "choose_prefix", "find_layer", "find_layers", "holds_experts"]

PROJECTIONS = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "gate_up_proj": "gate_up",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
    "input_linear": "gate_up",
    "output_linear": "down",
}
BIAS = "_bias"
"""Ends the projection's name of a bias: `gate_bias`, `gate_up_bias`, …"""
_ROUTER = "router."
"""Begins the names of a module of its own that stands beside `input_linear` and `output_linear`."""
_LOOKED_FOR = (
    "gate_proj, up_proj, down_proj or gate_up_proj, down_proj (one tensor for all experts), "
    "or N.gate_proj.weight, N.up_proj.weight, N.down_proj.weight (one for each expert; also w1, w3, w2)"
)


@dataclass
class Layer:
    """The experts under one prefix. `stacked`: projection → (E, …) tensor; `single`: (projection, expert) → tensor.

    A bias is a projection of its own, `down_bias` beside `down`.
    """

    prefix: str
    stacked: dict[str, Entry] = field(default_factory=dict)
    single: dict[tuple[str, int], Entry] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.prefix or "weights"

    def add(self, projection: str, expert: int | None, entry: Entry) -> None:
        known = self.stacked.get(projection) if expert is None else self.single.get((projection, expert))
        if known is not None:
            raise WeightsError(f"{self.label}: {known.name} and {entry.name} are the same projection: pass one of them")
        if expert is None:
            self.stacked[projection] = entry
        else:
            self.single[projection, expert] = entry


def find_layer(entries: Sequence[Entry], where: str, prefix: str | None = None) -> Layer:
    """The one layer in `entries`, or the one under `prefix`.

    Raises `WeightsError` when there is none, more than one, or when tensors beside the experts would be dropped
    (quantisation scales).
    """
    layers = _group(entries)
    names = [entry.name for entry in entries]
    layer = layers[choose_prefix(layers, f"looked for {_LOOKED_FOR}; found {_some(names)}", where, prefix)]
    _refuse_leftovers(layer, entries)
    return layer


def find_layers(entries: Sequence[Entry], where: str) -> list[Layer]:
    """Every layer in `entries`, in their order. Raises `WeightsError` as `find_layer` does, for any of them."""
    layers = _group(entries)
    if not layers:
        names = [entry.name for entry in entries]
        raise WeightsError(f"no experts in {where}: looked for {_LOOKED_FOR}; found {_some(names)}")
    for layer in layers.values():
        _refuse_leftovers(layer, entries)
    return list(layers.values())


def holds_experts(entries: Iterable[Entry]) -> bool:
    """Whether any of them is a float projection of experts."""
    return any(_parse(entry) is not None for entry in entries)


def _group(entries: Iterable[Entry]) -> dict[str, Layer]:
    layers: dict[str, Layer] = {}
    for entry in entries:
        if (parsed := _parse(entry)) is not None:
            layer_prefix, projection, expert = parsed
            layers.setdefault(layer_prefix, Layer(layer_prefix)).add(projection, expert, entry)
    return layers


def _parse(entry: Entry) -> tuple[str, str, int | None] | None:
    """`model.layers.0.mlp.experts.3.w1.weight` → (`model.layers.0.mlp.experts`, `gate`, 3); None for other tensors."""
    parts = entry.name.split(".")
    last = parts.pop()
    if last in ("weight", "bias") and parts:
        last = parts.pop() + (BIAS if last == "bias" else "")
    name = last.removesuffix(BIAS)
    if name not in PROJECTIONS:
        return None
    is_bias = name != last
    projection = PROJECTIONS[name] + (BIAS if is_bias else "")
    if parts and parts[-1].isdecimal():
        return ".".join(parts[:-1]), projection, int(parts[-1])
    # Fewer dimensions and no expert number: a dense or shared MLP. Bare names are meant for us, whatever their shape.
    if parts and len(entry.shape) != (2 if is_bias else 3):
        return None
    return ".".join(parts), projection, None


def choose_prefix(layers: Collection[str], looked_for: str, where: str, prefix: str | None) -> str:
    """The one of `layers`' prefixes, or the one that `prefix` names, whole or by its start.

    Raises `WeightsError` when none fits (`looked_for` says what would be one) or several do.
    """
    if not layers:
        raise WeightsError(f"no experts in {where}: {looked_for}")
    if prefix is None:
        fitting = list(layers)
        if len(fitting) > 1:
            raise WeightsError(
                f"{where} holds the experts of {len(fitting)} layers; pass prefix= with one of {_some(fitting)}"
            )
        return fitting[0]
    wanted = prefix.rstrip(".")
    fitting = [name for name in layers if name == wanted or name.startswith(f"{wanted}.") or not wanted]
    if wanted in layers:
        fitting = [wanted]
    if not fitting:
        hint = did_you_mean(wanted, layers) or f"; there are {_some(list(layers))}"
        raise WeightsError(f"no experts under prefix {prefix!r} in {where}{hint}")
    if len(fitting) > 1:
        raise WeightsError(f"prefix {prefix!r} fits the experts of {len(fitting)} layers in {where}: {_some(fitting)}")
    return fitting[0]


def _refuse_leftovers(layer: Layer, entries: Iterable[Entry]) -> None:
    used = {entry.name for entry in (*layer.stacked.values(), *layer.single.values())}
    start = f"{layer.prefix}." if layer.prefix else ""
    beside = [entry.name for entry in entries if entry.name.startswith(start) and entry.name not in used]
    if leftovers := [name for name in beside if not name.removeprefix(start).startswith(_ROUTER)]:
        raise WeightsError(
            f"{layer.label}: {len(leftovers)} tensor(s) beside the experts' projections that the kernel would drop: "
            f"{_some(leftovers)}; it reads float weights and biases only, and the converter also what the config.json "
            "beside the files says to be quantised"
        )


def _some(names: Sequence[str]) -> str:
    """The first five, quoted, and how many more."""
    if not names:
        return "nothing"
    shown = ", ".join(repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
