"""Reads transformers' experts modules: shapes, layout and gate formula, from a live or a meta module."""

from ktransformers.experts.gate import GateFormula, recognise_gate
from ktransformers.experts.source import ModuleWeights, WeightsSource
from ktransformers.experts.spec import ExpertsSpec
from ktransformers.experts.weights import ExpertWeights, expert_weights, layer_weights, weight_shapes

__all__ = [
    "ExpertWeights",
    "ExpertsSpec",
    "GateFormula",
    "ModuleWeights",
    "WeightsSource",
    "expert_weights",
    "layer_weights",
    "recognise_gate",
    "weight_shapes",
]
