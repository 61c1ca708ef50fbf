"""Whether the named tensors of one layer are what the config and the gate ask for: all there, none too many, of their
shapes, of one float dtype."""

from __future__ import annotations

from collections.abc import Iterable

from kt_kernel.arrays import FLOATS
from kt_kernel.checkpoint import Entry
from kt_kernel.config import MoEConfig
from kt_kernel.errors import WeightsError
from kt_kernel.naming import BIAS, Layer

__all__ = ["check_layer"]

_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "gate_up": "gate_up_proj"}


def check_layer(layer: Layer, config: MoEConfig, gated: bool) -> str:
    """The weights' common dtype.

    Raises `WeightsError` for what is missing, too much, misshapen or of another type.
    """
    _check_layout(layer)
    wanted = _check_projections(layer, config, gated)
    _check_biases(layer, config, wanted)
    for projection, entry in layer.stacked.items():
        _check_shape(entry, (config.expert_num, *_shape(projection, config)))
    for (projection, _), entry in layer.single.items():
        _check_shape(entry, _shape(projection, config))
    entries = [*layer.stacked.items(), *((projection, entry) for (projection, _), entry in layer.single.items())]
    for _, entry in entries:
        if entry.dtype not in FLOATS:
            raise WeightsError(f"{entry.name} in {entry.where} is {entry.dtype}; the kernel packs {', '.join(FLOATS)}")
    # Biases are kept as fp32, whatever they come as.
    dtypes = {entry.dtype: entry.name for projection, entry in entries if not projection.endswith(BIAS)}
    if len(dtypes) > 1:
        found = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
        raise WeightsError(f"{layer.label}: the projections have to be of one dtype; {found}")
    return next(iter(dtypes))


def _check_layout(layer: Layer) -> None:
    if layer.stacked and layer.single:
        raise WeightsError(
            f"{layer.label}: some projections are one tensor for all experts ({', '.join(layer.stacked)}), others one "
            f"tensor for each ({next(iter(layer.single.values())).name}, …): pass one layout"
        )


def _check_projections(layer: Layer, config: MoEConfig, gated: bool) -> set[str]:
    """The projections of the form that was passed, all of them there."""
    present = {name for name in _present(layer) if not name.endswith(BIAS)}
    fused = "gate_up" in present
    if not gated and (gates := sorted(present & {"gate", "gate_up"})):
        raise WeightsError(
            f"{layer.label}: {_listed(gates)} for experts without a gate (gated=False): leave it out, or pass another "
            "gate formula"
        )
    wanted = {"gate_up", "down"} if fused else {"gate", "up", "down"} if gated else {"up", "down"}
    if extra := present - wanted:
        raise WeightsError(f"{layer.label}: gate_up_proj and also {_listed(extra)}: pass one of the two forms")
    hint = ""
    if gated and present == {"up", "down"}:
        hint = "; experts without a gate are loaded with gate=GateFormula(activation=…, gated=False)"
    _check_each_expert(layer, config, wanted, hint)
    return wanted


def _check_biases(layer: Layer, config: MoEConfig, weights: set[str]) -> None:
    """A projection has a bias in every expert, or in none."""
    present = {name for name in _present(layer) if name.endswith(BIAS)}
    if extra := {name for name in present if name.removesuffix(BIAS) not in weights}:
        raise WeightsError(
            f"{layer.label}: {_listed(extra)} beside the weights {_listed(weights)}: biases come in the form of the "
            "weights"
        )
    _check_each_expert(layer, config, present)


def _present(layer: Layer) -> set[str]:
    return set(layer.stacked) or {projection for projection, _ in layer.single}


def _check_each_expert(layer: Layer, config: MoEConfig, wanted: set[str], hint: str = "") -> None:
    if layer.stacked:
        missing = [_name(name) for name in sorted(wanted - set(layer.stacked))]
        total = len(wanted)
    else:
        beyond = sorted({expert for _, expert in layer.single if expert >= config.expert_num})
        if beyond:
            raise WeightsError(
                f"{layer.label} has expert {beyond[-1]}; the config's expert_num is {config.expert_num}, "
                f"so the last is {config.expert_num - 1}"
            )
        expected = [(name, expert) for expert in range(config.expert_num) for name in sorted(wanted)]
        missing = [f"{expert}.{_name(name)}" for name, expert in expected if (name, expert) not in layer.single]
        total = len(expected)
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        first = ", ".join(missing[:5])
        raise WeightsError(f"{layer.label}: {len(missing)} of {total} tensors are missing: {first}{more}{hint}")


def _name(projection: str) -> str:
    weight = projection.removesuffix(BIAS)
    return _NAMES[weight] + projection[len(weight) :]


def _listed(projections: Iterable[str]) -> str:
    return ", ".join(sorted(map(_name, projections)))


def _shape(projection: str, config: MoEConfig) -> tuple[int, ...]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    shape = {
        "gate": (intermediate, hidden),
        "up": (intermediate, hidden),
        "down": (hidden, intermediate),
        "gate_up": (2 * intermediate, hidden),
    }[projection.removesuffix(BIAS)]
    return shape[:1] if projection.endswith(BIAS) else shape


def _check_shape(entry: Entry, expected: tuple[int, ...]) -> None:
    if entry.shape == expected:
        return
    text = f"{entry.name} in {entry.where} has shape {entry.shape}; the config makes it {expected}"
    if len(expected) > 1 and entry.shape == (*expected[:-2], expected[-1], expected[-2]):
        text += "; the last two dimensions are swapped: pass the transposed view, it is not copied"
    raise WeightsError(text)
