"""Experts computed by torch from the float weights: on any device, and for what the kernel does not implement."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ktransformers.experts import ExpertsSpec
from ktransformers.experts.probe import with_gate

__all__ = ["KExpertsTorch"]


class KExpertsTorch:
    """transformers' eager arithmetic with the module's own gate, activation and norm, on a device of choice.

    `resident=True` keeps a copy of the weights on the device (none is made when they are there already); otherwise the
    weights of the experts that a call needs travel there one by one and are dropped after use, so a device holds one
    expert at a time. Products run in the wider of the hidden states' and the weights' dtype; the sum over experts is
    fp32.
    """

    name = "KExpertsTorch"

    def __init__(self, module: nn.Module, spec: ExpertsSpec, device: torch.device, *, resident: bool) -> None:
        self.device = device
        self._module = module
        self._spec = spec
        self._resident = resident
        self._weights: dict[str, torch.Tensor] = {}
        self._norm: nn.Module | None = None

    def load(self) -> None:
        """Copies the weights to the device when they are to stay there."""
        if self._spec.has_post_expert_norm:
            self._norm = copy.deepcopy(self._module.get_submodule("post_expert_norm")).to(self.device)
        if self._resident:
            parameters = dict(self._module.named_parameters(recurse=False))
            self._weights = {n: p.detach().to(self.device) for n, p in parameters.items() if self._elsewhere(p)}

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden (T, H), ids (T, k), weights (T, k) → (T, H) on `device`, in hidden's dtype.

        Ids outside 0…E−1 contribute nothing, duplicates add up.
        """
        with torch.no_grad():
            hidden, ids, weights = (tensor.to(self.device) for tensor in (hidden, ids, weights))
            total = torch.zeros(hidden.shape, dtype=torch.float32, device=self.device)
            for expert in self._chosen(ids):
                token, slot = torch.where(ids == expert)
                output = self._expert(hidden[token], expert)
                total.index_add_(0, token, (output * weights[token, slot, None]).float())
            return total.to(hidden.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of weights this op holds besides the module's own."""
        return sum(tensor.nbytes for tensor in self._weights.values())

    def _chosen(self, ids: torch.Tensor) -> list[int]:
        chosen: list[int] = torch.unique(ids).tolist()
        return [expert for expert in chosen if 0 <= expert < self._spec.num_experts]

    def _expert(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        spec, module = self._spec, self._module
        first = "gate_up_proj" if spec.has_gate else "up_proj"
        inner = self._project(rows, first, expert)
        activated: Any = with_gate(module)._apply_gate(inner) if spec.has_gate else module.act_fn(inner)  # type: ignore[operator]
        output = self._project(activated, "down_proj", expert)
        return output if self._norm is None else self._norm(output)

    def _project(self, rows: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        weight = self._slice(name, expert)
        bias = self._slice(f"{name}_bias", expert) if self._spec.has_bias else None
        dtype = torch.promote_types(rows.dtype, weight.dtype)
        weight = weight.to(dtype).t() if self._spec.is_transposed else weight.to(dtype)
        return functional.linear(rows.to(dtype), weight, None if bias is None else bias.to(dtype))

    def _slice(self, name: str, expert: int) -> torch.Tensor:
        tensor = self._weights.get(name)
        if tensor is None:
            tensor = self._module.get_parameter(name).detach()
        return tensor[expert].to(self.device, non_blocking=True)

    def _elsewhere(self, parameter: torch.Tensor) -> bool:
        return parameter.device != torch.empty(0, device=self.device).device
