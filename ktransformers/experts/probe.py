"""Experts outside transformers' interface: their layout is known only when their own forward, cut down to a few
numbers, computes what that layout would.

The class is not rewritten or guessed at: a copy of the module with the same code and attributes, whose tensors and
sizes are tiny, is run once beside the plain arithmetic.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ktransformers.experts.gate import GateFormula, recognise_gate

__all__ = ["ProbedLayout", "probe", "with_gate"]

_EXPERTS, _HIDDEN, _INTERMEDIATE, _TOKENS = 3, 10, 7, 5
_SCALES = (0.3, 3.0, 40.0)  # up to where every clamp bites


@dataclass(frozen=True)
class ProbedLayout:
    """The flags that a class behind the interface would have; `is_presorted`: hidden states come as (E·T, H), the rows
    of expert 0 first, without ids and weights.
    """

    is_transposed: bool
    is_concatenated: bool
    is_presorted: bool
    gate: GateFormula


def probe(module: nn.Module, arguments: int) -> ProbedLayout | None:
    """The layout whose arithmetic `module.forward` with so many arguments computes, or None."""
    names = {name for name, _ in module.named_parameters(recurse=False)}
    if names != {"gate_up_proj", "down_proj"} or arguments not in (1, 3):
        return None
    for is_transposed, is_concatenated in ((False, True), (True, True), (False, False), (True, False)):
        gate = recognise_gate(with_gate(module), is_concatenated=is_concatenated)
        if gate is None:
            continue
        layout = ProbedLayout(is_transposed, is_concatenated, arguments == 1, gate)
        if _agrees(module, layout):
            return layout
    return None


def _agrees(module: nn.Module, layout: ProbedLayout) -> bool:
    try:
        with torch.device("cpu"), torch.no_grad():  # under `torch.device("meta")` too
            small = _cut_down(module, layout)
            if small is None:
                return False
            return all(torch.allclose(got, wanted, rtol=1e-4, atol=1e-5) for got, wanted in _both(small, layout))
    except Exception:
        # Whatever a foreign forward does not survive, it is none that is known.
        return False


def _both(small: Any, layout: ProbedLayout) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What the module's forward gives, and the plain arithmetic."""
    generator = torch.Generator().manual_seed(1)
    for scale in _SCALES:
        rows = _EXPERTS * _TOKENS if layout.is_presorted else _TOKENS
        x = torch.randn(rows, _HIDDEN, generator=generator) * scale
        if layout.is_presorted:
            ids, weights = torch.arange(_EXPERTS).repeat_interleave(_TOKENS)[:, None], torch.ones(rows, 1)
            got = type(small).forward(small, x)
        else:
            ids = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [2, 1]])
            weights = torch.rand(rows, 2, generator=generator)
            got = type(small).forward(small, x, ids, weights)
        yield got, _plain(small, layout, x, ids, weights)


def _plain(small: Any, layout: ProbedLayout, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    first, down = small.gate_up_proj, small.down_proj
    if layout.is_transposed:
        first, down = first.transpose(1, 2), down.transpose(1, 2)
    out = torch.zeros_like(x)
    for token, slot in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])).tolist():
        expert = int(ids[token, slot])
        both = functional.linear(x[token], first[expert])
        gate, up = both.chunk(2) if layout.is_concatenated else (both[0::2], both[1::2])
        out[token] += weights[token, slot] * functional.linear(layout.gate(gate, up), down[expert])
    return out


def _cut_down(module: nn.Module, layout: ProbedLayout) -> Any:
    """The module's code and attributes over tiny tensors; None where its sizes cannot be told from each other."""
    experts, a, b = module.get_parameter("down_proj").shape
    hidden, intermediate = (b, a) if layout.is_transposed else (a, b)
    rows = (experts, hidden, 2 * intermediate) if layout.is_transposed else (experts, 2 * intermediate, hidden)
    sizes = {experts: _EXPERTS, hidden: _HIDDEN, intermediate: _INTERMEDIATE, 2 * intermediate: 2 * _INTERMEDIATE}
    if len(sizes) < 4 or tuple(module.get_parameter("gate_up_proj").shape) != rows:
        return None
    small: Any = copy.copy(module)
    generator = torch.Generator().manual_seed(0)
    small.__dict__["_parameters"] = {
        name: torch.randn([sizes[size] for size in module.get_parameter(name).shape], generator=generator)
        for name in ("gate_up_proj", "down_proj")
    }
    for name, value in vars(module).items():
        if isinstance(value, int) and not isinstance(value, bool) and value in sizes:
            small.__dict__[name] = sizes[value]
    return small


class _Plain(nn.Module):
    """A gate of transformers' default kind."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.act_fn = activation

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gated: torch.Tensor = self.act_fn(gate) * up
        return gated


def with_gate(module: nn.Module) -> nn.Module:
    """Something with `_apply_gate` and `act_fn`: the module, or transformers' default around its activation."""
    return module if hasattr(module, "_apply_gate") else _Plain(getattr(module, "act_fn", None))
