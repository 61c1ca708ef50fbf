"""Tells a bug from what a format loses: each replaced layer against transformers' own experts with the same weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ktransformers.checkpoints import FloatsOf, FloatSource
from ktransformers.errors import InjectionError
from ktransformers.injection.report import Report
from ktransformers.operators.experts import KTransformersExperts

__all__ = ["LayerCheck", "verify"]

# The least cosine of an output with the float experts'. Measured on random and on trained weights: BF16 0.99999, INT8
# 0.9998, FP8 0.9988, INT4 0.989; gate and up in each other's place give 0.56.
LEAST_COSINE = {"BF16": 0.9999, "INT8": 0.999, "INT8_GROUPED": 0.999, "FP8": 0.997, "INT4": 0.98}
_TORCH = 0.9999  # what runs in torch computes the same in the model's dtype
_USUAL_TOP_K = 2


@dataclass(frozen=True)
class LayerCheck:
    """One layer: what runs, the cosine and relative L2 error of its outputs, and the least cosine that is no fault."""

    name: str
    runs: str
    cosine: float
    relative_error: float
    least_cosine: float

    @property
    def passed(self) -> bool:
        """NaN is no pass."""
        return self.cosine >= self.least_cosine


def verify(
    model: nn.Module, report: Report, *, floats: FloatsOf | None = None, tokens: int = 64, seed: int = 0
) -> Iterator[LayerCheck]:
    """Sends random tokens through each layer of experts that `report` replaced, and through its float original.

    Floats that were freed come from `floats`, one layer's at a time. Raises `InjectionError` when there is no layer of
    experts, or no way to its floats.
    """
    names = [entry.name for entry in report.replacements]
    layers = {name: module for name in names if isinstance(module := model.get_submodule(name), KTransformersExperts)}
    if not layers:
        raise InjectionError("no experts were replaced: there is nothing to verify")
    formats = {entry.name: entry.details.get("format", "") for entry in report.replacements}
    for name, layer in layers.items():
        if floats is None and not layer.has_float_weights:
            raise InjectionError(f"{name}: its float weights were freed; load the model with keep_float=True")
    source = None if floats is None else floats(list(layers))
    draw = torch.Generator().manual_seed(seed)
    for name, layer in layers.items():
        yield _check(name, layer, source, formats[name], tokens, draw)


def _original(name: str, layer: KTransformersExperts, floats: FloatSource | None) -> nn.Module:
    """What `layer` replaced, in fp32 and apart from the model."""
    original: nn.Module = copy.deepcopy(layer.orig_module).float()
    if not layer.has_float_weights:
        assert floats is not None
        floats(name, original)
    return original


def _check(
    name: str,
    layer: KTransformersExperts,
    floats: FloatSource | None,
    format: str,
    tokens: int,
    draw: torch.Generator,
) -> LayerCheck:
    spec = layer.spec
    if layer.options.prefill_threshold > 0:  # more tokens would not go where generation goes
        tokens = min(tokens, layer.options.prefill_threshold)
    top_k = min(spec.top_k or _USUAL_TOP_K, spec.num_experts)
    rows = tokens * spec.num_experts if spec.is_presorted else tokens
    hidden = torch.randn(rows, spec.hidden_dim, generator=draw)
    ids = torch.rand(tokens, spec.num_experts, generator=draw).argsort(-1)[:, :top_k].contiguous()
    weights = torch.softmax(torch.randn(tokens, top_k, generator=draw), -1)
    routing = () if spec.is_presorted else (ids, weights)
    with torch.inference_mode():
        given = layer(hidden.to(spec.dtype), *routing).double().cpu()
        wanted = _original(name, layer, floats)(hidden.to(spec.dtype).float(), *routing).double().cpu()
    cosine = torch.nn.functional.cosine_similarity(given.flatten(), wanted.flatten(), dim=0).item()
    error = ((given - wanted).norm() / wanted.norm()).item()
    least = min((LEAST_COSINE.get(each, _TORCH) for each in format.split("+")), default=_TORCH)
    return LayerCheck(name, layer.active_backend, cosine, error, least)
