"""Views of an experts module's weights as the kernel wants them. Layouts are handled by strides: nothing is copied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ktransformers.errors import UnsupportedModuleError
from ktransformers.experts.spec import ExpertsSpec

__all__ = ["ExpertWeights", "expert_weights", "layer_weights"]


@dataclass(frozen=True)
class ExpertWeights:
    """Gate (I, H), up (I, H) and down (H, I) of one expert, or of all with a leading E. Views, often not contiguous."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


def layer_weights(module: nn.Module, spec: ExpertsSpec) -> ExpertWeights:
    """Views of every expert of the module `spec` was read from: gate and up (E, I, H), down (E, H, I).

    Raises `UnsupportedModuleError` for experts without a gate, or whose weights are on the meta device.
    """
    if not spec.has_gate:
        raise UnsupportedModuleError(f"{spec.class_name} has no gate projection to give a view of")
    fused, down = (_parameter(module, name, spec) for name in ("gate_up_proj", "down_proj"))
    if spec.is_transposed:
        fused, down = fused.transpose(1, 2), down.transpose(1, 2)
    half = spec.intermediate_dim
    if spec.is_concatenated:
        return ExpertWeights(fused[:, :half], fused[:, half:], down)
    return ExpertWeights(fused[:, 0::2], fused[:, 1::2], down)


def expert_weights(module: nn.Module, spec: ExpertsSpec, expert: int) -> ExpertWeights:
    """Views of one expert: gate and up (I, H), down (H, I). Raises `IndexError` outside 0…E−1."""
    if not 0 <= expert < spec.num_experts:
        raise IndexError(f"expert {expert} of {spec.num_experts}")
    layer = layer_weights(module, spec)
    return ExpertWeights(layer.gate[expert], layer.up[expert], layer.down[expert])


def _parameter(module: nn.Module, name: str, spec: ExpertsSpec) -> torch.Tensor:
    tensor: torch.Tensor = module.get_parameter(name).detach()
    if tensor.is_meta:
        raise UnsupportedModuleError(
            f"{name} of {spec.class_name} holds no numbers (meta device): it was freed, offloaded, or never loaded"
        )
    return tensor
