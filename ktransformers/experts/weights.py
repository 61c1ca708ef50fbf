"""Views of an experts module's weights as the kernel wants them. Layouts are handled by strides: nothing is copied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ktransformers.errors import UnsupportedModuleError
from ktransformers.experts.spec import ExpertsSpec

__all__ = ["ExpertWeights", "expert_weights", "layer_weights", "weight_shapes"]


@dataclass(frozen=True)
class ExpertWeights:
    """Gate (I, H), up (I, H) and down (H, I) of one expert, or of all with a leading E. Views, often not contiguous.

    `gate` is None where there is none; the biases (I), (I), (H), or with a leading E, are None in a layer without.
    """

    gate: torch.Tensor | None
    up: torch.Tensor
    down: torch.Tensor
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    def named(self) -> dict[str, torch.Tensor]:
        """What there is, by the names that `kt_kernel.MoEWrapper.load_weights` has for it."""
        given = {
            "gate_proj": self.gate,
            "up_proj": self.up,
            "down_proj": self.down,
            "gate_proj_bias": self.gate_bias,
            "up_proj_bias": self.up_bias,
            "down_proj_bias": self.down_bias,
        }
        return {name: tensor for name, tensor in given.items() if tensor is not None}


def layer_weights(module: nn.Module, spec: ExpertsSpec) -> ExpertWeights:
    """Views of every expert of the module `spec` was read from: gate and up (E, I, H), down (E, H, I).

    Raises `UnsupportedModuleError` when the weights are on the meta device.
    """
    first_name = "gate_up_proj" if spec.has_gate else "up_proj"
    first, down = (_parameter(module, name, spec) for name in (first_name, "down_proj"))
    if spec.is_transposed:
        first, down = first.transpose(1, 2), down.transpose(1, 2)
    gate, up = _halves(first, spec)
    if not spec.has_bias:
        return ExpertWeights(gate, up, down)
    gate_bias, up_bias = _halves(_parameter(module, f"{first_name}_bias", spec), spec)
    return ExpertWeights(gate, up, down, gate_bias, up_bias, _parameter(module, "down_proj_bias", spec))


def weight_shapes(spec: ExpertsSpec) -> dict[str, tuple[int, ...]]:
    """The shapes of what `layer_weights` gives, by the names that `kt_kernel.MoEWrapper.load_weights` has for it."""
    experts, hidden, intermediate = spec.num_experts, spec.hidden_dim, spec.intermediate_dim
    first = ("gate_proj", "up_proj") if spec.has_gate else ("up_proj",)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(first, (experts, intermediate, hidden))
    shapes["down_proj"] = (experts, hidden, intermediate)
    biases = {f"{name}_bias": shape[:2] for name, shape in shapes.items()}
    return {**shapes, **biases} if spec.has_bias else shapes


def expert_weights(module: nn.Module, spec: ExpertsSpec, expert: int) -> ExpertWeights:
    """Views of one expert: gate and up (I, H), down (H, I). Raises `IndexError` outside 0…E−1."""
    if not 0 <= expert < spec.num_experts:
        raise IndexError(f"expert {expert} of {spec.num_experts}")
    layer = layer_weights(module, spec)

    def one(view: torch.Tensor | None) -> torch.Tensor | None:
        return None if view is None else view[expert]

    biases = one(layer.gate_bias), one(layer.up_bias), one(layer.down_bias)
    return ExpertWeights(one(layer.gate), layer.up[expert], layer.down[expert], *biases)


def _halves(both: torch.Tensor, spec: ExpertsSpec) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Gate and up out of (E, 2I, …)."""
    if not spec.has_gate:
        return None, both
    if spec.is_concatenated:
        return both[:, : spec.intermediate_dim], both[:, spec.intermediate_dim :]
    return both[:, 0::2], both[:, 1::2]


def _parameter(module: nn.Module, name: str, spec: ExpertsSpec) -> torch.Tensor:
    tensor: torch.Tensor = module.get_parameter(name).detach()
    if tensor.is_meta:
        raise UnsupportedModuleError(
            f"{name} of {spec.class_name} holds no numbers (meta device): it was freed, offloaded, or never loaded"
        )
    return tensor
