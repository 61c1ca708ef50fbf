"""The experts of a quantised checkpoint: which tensors make a projection, and its matrix when it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from numpy.typing import NDArray

from kt_kernel.arrays import FLOATS, as_float32
from kt_kernel.checkpoint import Entry
from kt_kernel.errors import WeightsError
from kt_kernel.naming import BIAS, PROJECTIONS
from kt_kernel.quantized import Fp8Matrix, GroupedMatrix
from kt_kernel.sources.base import Parts, Scheme, Weight, as_numpy

__all__ = ["OF_ACTIVATIONS", "Matrices", "QuantizedLayer", "find_quantized"]

OF_ACTIVATIONS = ("input_scale", "input_global_scale", "input_zero_point")
"""Last names of tensors that say how other kernels quantise activations; ours measure every token."""
_KEYS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@dataclass(frozen=True)
class Matrices(Sequence[Weight]):
    """One projection of every expert, (channels, inputs) each, read and decoded when it is taken.

    `rows`: the channels wanted of what is stored, such as every second one of an interleaved gate_up.
    """

    label: str
    scheme: Scheme
    stored: Mapping[int, Mapping[str, tuple[Entry, int | None]]]
    rows: slice | None = None

    def __len__(self) -> int:
        return len(self.stored)

    @overload
    def __getitem__(self, index: int) -> Weight: ...

    @overload
    def __getitem__(self, index: slice) -> list[Weight]: ...

    def __getitem__(self, index: int | slice) -> Weight | list[Weight]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]  # raises IndexError, which ends an iteration
        parts = {name: as_numpy(entry.fetch(expert)) for name, (entry, expert) in self.stored[index].items()}
        label = f"{self.label}, expert {index}"
        plain = parts.get("weight")
        if set(parts) == {"weight"} and plain is not None and plain.dtype != np.uint8:  # left out of the quantisation
            return _rows(np.ascontiguousarray(plain, dtype=np.float32), self.rows, label)
        return _rows(self.scheme.decode(Parts(label, parts)), self.rows, label)


@dataclass
class QuantizedLayer:
    """The experts under one prefix. `stored`: projection → expert → part → tensor, and the expert's place in it."""

    prefix: str
    scheme: Scheme
    stored: dict[str, dict[int, dict[str, tuple[Entry, int | None]]]] = field(default_factory=dict)
    biases: dict[str, Entry] = field(default_factory=dict)

    @property
    def entries(self) -> Iterator[Entry]:
        """Every tensor, once."""
        seen = {
            id(entry): entry
            for experts in self.stored.values()
            for parts in experts.values()
            for entry, _ in parts.values()
        }
        return iter((*seen.values(), *self.biases.values()))

    @property
    def plain(self) -> int:
        """How many of its weights were left out of the quantisation."""
        return sum(parts.keys() == {"weight"} for experts in self.stored.values() for parts in experts.values())

    @property
    def count(self) -> int:
        """Of its weights."""
        return sum(len(experts) for experts in self.stored.values())

    def check(self, entries: Iterable[Entry]) -> None:
        """What headers tell: every expert is stored as the first, and nothing is left over of what `entries` have under
        the prefix but scales of activations, which are measured here. Raises `WeightsError` that names the tensor.
        """
        used = {entry.name for entry in self.entries}
        left = [e.name for e in entries if e.name.startswith(f"{self.prefix}.") and e.name not in used]
        if left := [name for name in left if not name.endswith(OF_ACTIVATIONS)]:
            raise WeightsError(
                f"{self.prefix}: {len(left)} tensor(s) beside the experts' weights that would be dropped: "
                f"{', '.join(left[:5])}; of {self.scheme.name}, {', '.join(self.scheme.parts)} are read"
            )
        for projection, experts in self.stored.items():
            every = {part for parts in experts.values() for part in parts}
            first: dict[str, Entry] = {}
            for expert, parts in experts.items():
                if set(parts) == {"weight"} and parts["weight"][0].dtype in FLOATS:
                    continue  # left out of the quantisation
                if lost := sorted(every - set(parts)):
                    where = f"{self.prefix}.{projection}, expert {expert}"
                    raise WeightsError(f"{where} has no {lost[0]}, and others have; the checkpoint is not whole")
                for part, (entry, _) in parts.items():
                    _check_alike(entry, first.setdefault(part, entry))

    def matrices(self, interleaved: bool = False) -> dict[str, Sequence[Weight] | NDArray[np.float32]]:
        """`gate_proj`, `up_proj`, `down_proj`, and their biases (E, channels) where there are any.

        interleaved: a fused gate_up has gate and up channels in turns (gpt-oss), not one half each.
        Raises `WeightsError` for a projection or an expert that is missing.
        """
        found: dict[str, Sequence[Weight] | NDArray[np.float32]] = {}
        experts = self._experts()
        for projection in self.stored:
            label = f"{self.prefix}.{projection}"
            for part, rows in self._split(projection, interleaved).items():
                found[_KEYS[part]] = Matrices(label, self.scheme, self.stored[projection], rows)
        for projection, entry in self.biases.items():
            bias = as_float32(entry.fetch(None))
            for part, rows in self._split(projection, interleaved).items():
                found[_KEYS[part] + BIAS] = np.ascontiguousarray(bias if rows is None else bias[:, rows])
        if absent := {"up_proj", "down_proj"} - set(found):
            raise WeightsError(f"{self.prefix}: {experts} experts without {' and '.join(sorted(absent))}")
        return found

    def _experts(self) -> int:
        counts = {projection: set(experts) for projection, experts in self.stored.items()}
        every = set().union(*counts.values())
        wanted = set(range(1 + max(every)))
        for projection, there in counts.items():
            if lost := sorted(wanted - there):
                raise WeightsError(f"{self.prefix}: expert {lost[0]} has no {projection} ({len(lost)} are missing)")
        return len(wanted)

    def _split(self, projection: str, interleaved: bool) -> dict[str, slice | None]:
        if projection != "gate_up":
            return {projection: None}
        if interleaved:
            return {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
        stored = next(iter(self.stored[projection].values()))
        entry, place = next(iter(stored.values()))
        half = entry.shape[0 if place is None else 1] // 2
        return {"gate": slice(0, half), "up": slice(half, None)}


def find_quantized(entries: Iterable[Entry], scheme: Scheme) -> dict[str, QuantizedLayer]:
    """The experts in `entries`, by their prefix (`model.layers.0.mlp.experts`).

    One tensor for each expert, `experts.3.up_proj.<part>`, or one for all, `experts.up_proj_<part>` (E, …).
    """
    layers: dict[str, QuantizedLayer] = {}
    for entry in entries:
        parsed = _parse(entry, scheme)
        if parsed is None:
            continue
        prefix, projection, expert, part = parsed
        layer = layers.setdefault(prefix, QuantizedLayer(prefix, scheme))
        if part == "bias":
            layer.biases[projection] = entry
        elif expert is not None:
            layer.stored.setdefault(projection, {}).setdefault(expert, {})[part] = (entry, None)
        else:
            for place in range(entry.shape[0]):
                layer.stored.setdefault(projection, {}).setdefault(place, {})[part] = (entry, place)
    return {prefix: layer for prefix, layer in layers.items() if layer.stored}


def _parse(entry: Entry, scheme: Scheme) -> tuple[str, str, int | None, str] | None:
    """`model.layers.0.mlp.experts.3.w1.qweight` → (`model.layers.0.mlp.experts`, `gate`, 3, `qweight`)."""
    pieces = entry.name.split(".")
    if pieces[-1] in scheme.parts and len(pieces) >= 3 and pieces[-2] in PROJECTIONS and pieces[-3].isdecimal():
        return ".".join(pieces[:-3]), PROJECTIONS[pieces[-2]], int(pieces[-3]), pieces[-1]
    name, _, part = pieces[-1].rpartition("_")
    if name in PROJECTIONS and (part in scheme.parts or part == "bias") and len(entry.shape) > 1:
        return ".".join(pieces[:-1]), PROJECTIONS[name], None, part
    return None


def _check_alike(entry: Entry, first: Entry) -> None:
    if (entry.shape, entry.dtype) != (first.shape, first.dtype):
        raise WeightsError(
            f"{entry.name} in {entry.where} is {entry.dtype} {entry.shape}; {first.name} is {first.dtype} "
            f"{first.shape}, and experts are all alike"
        )


def _rows(weight: Weight, rows: slice | None, label: str) -> Weight:
    if rows is None:
        return weight
    if isinstance(weight, GroupedMatrix):
        minimums = None if weight.minimums is None else np.ascontiguousarray(weight.minimums[rows])
        values, scales = np.ascontiguousarray(weight.values[rows]), np.ascontiguousarray(weight.scales[rows])
        return GroupedMatrix(values, scales, weight.group, weight.levels, minimums)
    if isinstance(weight, Fp8Matrix):
        first, last, step = rows.indices(weight.shape[0])
        height = weight.block[0]
        if step != 1 or first % height or (last % height and last != weight.shape[0]):
            raise WeightsError(f"{label}: gate and up share blocks of {height} channels; they cannot be told apart")
        scales = weight.scales[first // height : -(-last // height)]
        return Fp8Matrix(np.ascontiguousarray(weight.codes[rows]), np.ascontiguousarray(scales), weight.block)
    return np.ascontiguousarray(weight[rows])
