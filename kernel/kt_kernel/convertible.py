"""The layers of a checkpoint as the converter takes them: what the file of each will say, and how it is packed.

Floats are quantised by the method. What came quantised keeps its own numbers where the method's format holds them, or
with method auto; else it is decoded and quantised a second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kt_kernel import _ext
from kt_kernel.backends import AUTO, Backend, Format
from kt_kernel.checkpoint import Entry
from kt_kernel.config import MoEConfig
from kt_kernel.errors import ConfigError, WeightsError
from kt_kernel.layer_check import check_layer
from kt_kernel.layer_formats import ROTATED, LayerFormats
from kt_kernel.model_config import ModelConfig
from kt_kernel.naming import BIAS, Layer, find_layers, holds_experts
from kt_kernel.packed_file import PackedLayer, Source
from kt_kernel.quantized import Fp8Matrix, GroupedMatrix
from kt_kernel.quantized_weights import QuantizedExperts, held_in, open_quantized, pack_quantized
from kt_kernel.sources import scheme_for
from kt_kernel.sources.experts import QuantizedLayer, find_quantized
from kt_kernel.transposed import is_interleaved, upright
from kt_kernel.weights import ExpertWeights, pack

__all__ = ["Convertible", "find_convertible"]


class Convertible(Protocol):
    """One layer. `packed` is what its file will say; `second` whether it is quantised a second time."""

    @property
    def packed(self) -> PackedLayer: ...

    @property
    def second(self) -> bool: ...

    def is_in(self, layer: PackedLayer) -> bool:
        """Whether a file that says `layer` holds this layer, of this very source."""

    def pack(self, context: _ext.Context, tier: str) -> _ext.PackedExperts:
        """Raises `WeightsError` that names layer, expert and place."""


@dataclass(frozen=True, eq=False)
class _Floats:
    weights: ExpertWeights
    packed: PackedLayer
    second: bool = False

    def is_in(self, layer: PackedLayer) -> bool:
        return layer == self.packed

    def pack(self, context: _ext.Context, tier: str) -> _ext.PackedExperts:
        return pack(self.weights, context, tier, self.packed.formats, self.packed.rotated)


@dataclass(frozen=True, eq=False)
class _OwnGrid:
    """`packed` has the scales' dtype of the first expert; another one may ask for a wider."""

    experts: QuantizedExperts
    packed: PackedLayer
    second: bool = False

    def is_in(self, layer: PackedLayer) -> bool:
        return _but_scales(layer) == _but_scales(self.packed)

    def pack(self, context: _ext.Context, tier: str) -> _ext.PackedExperts:
        del tier  # nothing is computed
        try:
            return pack_quantized(self.experts, context)
        except WeightsError as error:
            raise WeightsError(f"{self.packed.prefix}: {error}") from error


def _but_scales(layer: PackedLayer) -> PackedLayer:
    formats = layer.formats
    alike = LayerFormats(replace(formats.gate_up, scales="float32"), replace(formats.down, scales="float32"))
    return replace(layer, formats=alike, bytes_per_expert=0)


def find_convertible(
    entries: Sequence[Entry], where: str, model: ModelConfig, method: Backend, rotate: bool
) -> list[Convertible]:
    """Every layer of experts in `entries`, checked as far as headers and the first expert of quantised layers tell.

    Raises `WeightsError` for what is missing, misshapen, of no dtype or quantisation that is read, or for another model
    than config.json says.
    """
    found: list[Convertible] = []
    rest = list(entries)
    if model.quantization is not None:
        layers = find_quantized(entries, scheme_for(model.quantization))
        layers = {prefix: layer for prefix, layer in layers.items() if layer.plain < layer.count}
        found = [_quantized(layer, entries, model, method, rotate) for layer in layers.values()]
        starts = tuple(f"{prefix}." for prefix in layers)
        rest = [entry for entry in entries if not entry.name.startswith(starts)] if starts else rest
    if not found or holds_experts(rest):  # layers that were left out of the quantisation
        for layer in find_layers(rest, where):
            found.append(_floats(upright(layer, model.model_type), method.format, rotate))
    for one in found:
        if model.hidden_size is not None and one.packed.hidden != model.hidden_size:
            raise WeightsError(
                f"{one.packed.prefix}: down_proj has {one.packed.hidden} outputs, and config.json's hidden_size is "
                f"{model.hidden_size}: the weights are another model's, or saved in a way that is not read"
            )
    return found


def _floats(layer: Layer, format: Format, rotate: bool, second: bool = False) -> _Floats:
    gated = any(projection.removesuffix(BIAS) in ("gate", "gate_up") for projection in _projections(layer))
    config = _config(layer)
    try:
        config.check_format(format)
    except ConfigError as error:
        raise WeightsError(f"{layer.label}: {error}") from error
    weights = ExpertWeights(layer, config, check_layer(layer, config, gated), gated)
    entries = (*layer.stacked.values(), *layer.single.values())
    formats, rotated = LayerFormats.both(format), rotate and format in ROTATED
    described = _described(layer.prefix, config, formats, rotated, gated, weights.biased, entries)
    return _Floats(weights, described, second)


def _projections(layer: Layer) -> set[str]:
    return {*layer.stacked, *(projection for projection, _ in layer.single)}


def _config(layer: Layer) -> MoEConfig:
    """The layer's sizes, as its down projection has them: (E, H, I), or (H, I) for each expert."""
    stacked = layer.stacked.get("down")
    singles = [(expert, entry) for (projection, expert), entry in layer.single.items() if projection == "down"]
    if stacked is not None and len(stacked.shape) == 3:
        return _sizes(*stacked.shape)
    if singles and len(singles[0][1].shape) == 2:
        return _sizes(1 + max(expert for _, expert in layer.single), *singles[0][1].shape)
    raise WeightsError(f"{layer.label}: no down projection (experts, hidden, intermediate) to take the sizes from")


def _sizes(experts: int, hidden: int, intermediate: int) -> MoEConfig:
    sizes = {"expert_num": experts, "hidden_size": hidden, "intermediate_size": intermediate}
    return MoEConfig.from_dict({**sizes, "max_len": 1, "num_experts_per_tok": 1})


def _described(
    prefix: str,
    config: MoEConfig,
    formats: LayerFormats,
    rotated: bool,
    gated: bool,
    biased: bool,
    entries: Sequence[Entry],
) -> PackedLayer:
    sizes = config.expert_num, config.hidden_size, config.intermediate_size
    # One expert is enough to know the bytes of all.
    one = formats.allocate(1, *sizes[1:], rotate=rotated, gated=gated, biased=biased)
    sources = tuple(Source.of(Path(file)) for file in sorted({entry.where for entry in entries}))
    return PackedLayer(prefix, *sizes, formats, one.rotated, gated, biased, one.bytes_per_expert, sources)


def _quantized(
    layer: QuantizedLayer, entries: Sequence[Entry], model: ModelConfig, method: Backend, rotate: bool
) -> Convertible:
    own = list(layer.entries)
    layer.check(entries)
    matrices = layer.matrices(is_interleaved(model.model_type))
    first = {name: value[0] for name, value in matrices.items() if not name.endswith(BIAS)}
    config = _sizes(len(matrices["down_proj"]), *first["down_proj"].shape)
    gated = "gate_proj" in matrices
    own_grid = all(isinstance(matrix, (GroupedMatrix, Fp8Matrix)) for matrix in first.values())
    if not layer.plain and own_grid and (method == AUTO or held_in(first) == method.format):
        experts = open_quantized(matrices, config, gated)
        formats = experts.formats()
        described = _described(layer.prefix, config, formats, False, gated, bool(experts.biases), own)
        return _OwnGrid(experts, described)
    return _decoded(layer, matrices, model.dtype, config, own, method.format, rotate)


def _decoded(
    layer: QuantizedLayer,
    matrices: Mapping[str, Any],
    dtype: str,
    config: MoEConfig,
    entries: Sequence[Entry],
    format: Format,
    rotate: bool,
) -> _Floats:
    """As floats of the model's dtype, which is how they are without a converter too."""
    wide = config.intermediate_size, config.hidden_size
    shapes = {"gate_proj": wide, "up_proj": wide, "down_proj": wide[::-1]}
    made = Layer(layer.prefix)
    for name, value in matrices.items():
        weight = name.removesuffix(BIAS)
        projection = weight.removesuffix("_proj") + name[len(weight) :]
        fetch = partial(_bias, value) if name.endswith(BIAS) else partial(_decode, value, dtype, shapes[name])
        shape = value.shape if name.endswith(BIAS) else (config.expert_num, *shapes[name])
        kind = "float32" if name.endswith(BIAS) else dtype
        made.stacked[projection] = Entry(f"{layer.prefix}.{name}", tuple(shape), kind, entries[0].where, fetch)
    floats = _floats(made, format, rotate, second=True)
    sources = tuple(Source.of(Path(file)) for file in sorted({entry.where for entry in entries}))
    return replace(floats, packed=replace(floats.packed, sources=sources))


def _bias(values: Any, expert: int | None) -> Any:
    return values if expert is None else values[expert]


def _decode(matrices: Sequence[Any], dtype: str, shape: tuple[int, int], expert: int | None) -> Any:
    import torch  # numpy has no bfloat16

    assert expert is not None
    matrix = matrices[expert]
    values = matrix.dequantize() if isinstance(matrix, (GroupedMatrix, Fp8Matrix)) else np.ascontiguousarray(matrix)
    if values.shape != shape:
        raise WeightsError(f"expert {expert} is {values.shape}; the first makes it {shape}")
    return torch.from_numpy(values).to(getattr(torch, dtype))
