"""A forward that is not transformers' own is known only when it, cut down to a few numbers, computes what its layout
says: of a class outside transformers' interface, and of one inside whose forward somebody else wrote.

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

from ktransformers.experts.gate import recognise_gate

__all__ = ["Layout", "computes", "has_foreign_forward", "is_replaced_on_instance", "probe", "with_gate"]

# Multiples of 16 bytes, which torch's grouped products ask for.
_EXPERTS, _HIDDEN, _INTERMEDIATE, _TOKENS = 3, 12, 8, 5
_SCALES = (0.3, 3.0, 40.0)  # up to where every clamp bites


@dataclass(frozen=True)
class Layout:
    """transformers' flags of a class; `is_presorted`: hidden states come as (E·T, H), the rows of expert 0 first,
    without ids and weights.
    """

    is_transposed: bool
    is_concatenated: bool
    is_presorted: bool = False
    has_gate: bool = True
    has_bias: bool = False

    @property
    def first(self) -> str:
        return "gate_up_proj" if self.has_gate else "up_proj"

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of everything that the arithmetic reads."""
        weights = (self.first, "down_proj")
        return (*weights, *(f"{name}_bias" for name in weights)) if self.has_bias else weights


def is_replaced_on_instance(module: nn.Module) -> bool:
    """Whether this module's forward is another than its class's. accelerate's hooks, which move tensors only, wrap it
    and are looked through.
    """
    own = vars(module).get("_old_forward" if hasattr(module, "_hf_hook") else "forward")
    return own is not None and getattr(own, "__func__", own) is not type(module).forward


def has_foreign_forward(module: nn.Module) -> bool:
    """Whether the class's forward was written outside transformers (which wraps its own and keeps their names)."""
    return not str(type(module).forward.__module__).startswith("transformers.")


def probe(module: nn.Module, arguments: int) -> Layout | None:
    """The layout whose arithmetic `module.forward` with so many arguments computes, or None."""
    names = {name for name, _ in module.named_parameters(recurse=False)}
    if names != {"gate_up_proj", "down_proj"} or arguments not in (1, 3):
        return None
    for is_transposed, is_concatenated in ((False, True), (True, True), (False, False), (True, False)):
        layout = Layout(is_transposed, is_concatenated, is_presorted=arguments == 1)
        known = recognise_gate(with_gate(module), is_concatenated=is_concatenated) is not None
        if known and computes(module, layout):
            return layout
    return None


def computes(module: nn.Module, layout: Layout) -> bool:
    """Whether the class's forward is the usual arithmetic of `layout` around the module's own gate."""
    try:
        with torch.device("cpu"), torch.no_grad():  # under `torch.device("meta")` too
            small = _cut_down(module, layout)
            if small is None:
                return False
            return all(_close(got, wanted) for got, wanted in _both(small, layout))
    except Exception:
        # Whatever a foreign forward does not survive, it is none that is known.
        return False


def _close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    rounding = 1e-5 + 1e-6 * float(wanted.abs().max())  # of sums in another order, which may cancel
    return torch.allclose(got, wanted, rtol=1e-4, atol=rounding)


def _both(small: Any, layout: Layout) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What the module's forward gives, and the plain arithmetic."""
    generator = torch.Generator().manual_seed(1)
    experts, hidden = small.down_proj.shape[0], small.down_proj.shape[2 if layout.is_transposed else 1]
    for scale in _SCALES:
        rows = experts * _TOKENS if layout.is_presorted else _TOKENS
        x = torch.randn(rows, hidden, generator=generator) * scale
        if layout.is_presorted:
            ids, weights = torch.arange(experts).repeat_interleave(_TOKENS)[:, None], torch.ones(rows, 1)
            got = type(small).forward(small, x)
        else:
            ids = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [2, 1]])
            weights = torch.rand(rows, 2, generator=generator)
            got = type(small).forward(small, x, ids, weights)
        yield got, _plain(small, layout, x, ids, weights)


def _plain(small: Any, layout: Layout, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    first, down = getattr(small, layout.first), small.down_proj
    if layout.is_transposed:
        first, down = first.transpose(1, 2), down.transpose(1, 2)
    gate: Any = with_gate(small)
    out = torch.zeros_like(x)
    for token, slot in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])).tolist():
        expert = int(ids[token, slot])
        biases = [getattr(small, f"{name}_bias")[expert] if layout.has_bias else None for name in layout.parameters[:2]]
        inner = functional.linear(x[token], first[expert], biases[0])[None]
        activated = gate._apply_gate(inner) if layout.has_gate else gate.act_fn(inner)
        out[token] += weights[token, slot] * functional.linear(activated[0], down[expert], biases[1])
    return out


def _cut_down(module: nn.Module, layout: Layout) -> Any:
    """The module's code and attributes over tiny tensors; None where its weights do not fit each other."""
    experts, a, b = module.get_parameter("down_proj").shape
    hidden, intermediate = (b, a) if layout.is_transposed else (a, b)
    inner = 2 * intermediate if layout.has_gate else intermediate
    rows = (experts, hidden, inner) if layout.is_transposed else (experts, inner, hidden)
    if tuple(module.get_parameter(layout.first).shape) != rows:
        return None
    # Equal sizes stay equal: an attribute that holds one of them may be read for any of them.
    sizes = {experts: _EXPERTS, hidden: _HIDDEN, intermediate: _INTERMEDIATE, 2 * intermediate: 2 * _INTERMEDIATE}
    small: Any = copy.copy(module)
    generator = torch.Generator().manual_seed(0)
    small.__dict__["_parameters"] = {
        name: torch.randn([sizes[size] for size in module.get_parameter(name).shape], generator=generator)
        for name in layout.parameters
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
