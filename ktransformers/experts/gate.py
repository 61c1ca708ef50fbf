"""Which gate formula an experts module computes, found by computing it.

A class name says nothing about clamps, and a `hidden_act` of "silu" nothing about what surrounds it. So the module's
own `_apply_gate` is asked for a few numbers that give away the constants, and then has to agree with the formula on a
grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

__all__ = ["GateFormula", "recognise_gate"]

GateKind = Literal["silu", "clamped_silu", "swiglu_oai"]

# Gate and up values where formulas differ: tails, both sides of zero, neighbours of round clamp values.
_NEAR_ZERO = (-3.0, -1.25, -1.0, -0.5, -0.03, 0.0, 0.02, 0.5, 0.99, 1.01, 2.0, 3.0)
_TAILS = (-60.0, -20.0, -10.5, -7.01, -6.99, 6.99, 7.01, 9.5, 10.5, 20.0, 60.0)
_GRID = torch.tensor([*_NEAR_ZERO, *_TAILS], dtype=torch.float64, device="cpu")  # even under `torch.device("meta")`
_FAR = 1e6  # beyond any clamp a model uses
_RELATIVE, _ABSOLUTE = 1e-5, 1e-6  # modules may go through float32 inside; formulas differ by far more


@dataclass(frozen=True)
class GateFormula:
    """A gate the kernel computes; g is the gate projection's output, u the up projection's.

    - `silu`: silu(g)·u
    - `clamped_silu`: silu(min(g, limit))·clamp(u, ±limit)
    - `swiglu_oai`: g·sigmoid(alpha·g)·(u + 1), with the same clamps when limit > 0

    `alpha` and `limit` are 0 where the formula has none.
    """

    kind: GateKind
    alpha: float = 0.0
    limit: float = 0.0

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.limit > 0:
            gate = gate.clamp(max=self.limit)
            up = up.clamp(min=-self.limit, max=self.limit)
        if self.kind == "swiglu_oai":
            return gate * torch.sigmoid(self.alpha * gate) * (up + 1)
        return nn.functional.silu(gate) * up

    def __str__(self) -> str:
        constants = {"alpha": self.alpha, "limit": self.limit}
        given = ", ".join(f"{name}={value:g}" for name, value in constants.items() if value)
        return f"{self.kind}({given})" if given else self.kind


def recognise_gate(module: nn.Module, *, is_concatenated: bool) -> GateFormula | None:
    """The formula behind `module._apply_gate`, or None when the kernel has none that agrees with it.

    `is_concatenated`: gate and up come as two halves; otherwise they alternate. Works on a meta module: `_apply_gate`
    computes with its argument only. A gate that needs parameters fails there, and is None too.
    """
    try:
        formula = _measure(module, is_concatenated)
        gate, up = (side.flatten() for side in torch.meshgrid(_around(formula), _around(formula), indexing="ij"))
        got = _evaluate(module, gate, up, is_concatenated)
    except Exception:
        # Whatever a foreign `_apply_gate` does not survive, it is no formula of ours.
        return None
    agrees = got.shape == gate.shape and torch.allclose(got, formula(gate, up), rtol=_RELATIVE, atol=_ABSOLUTE)
    return formula if agrees else None


def _measure(module: nn.Module, is_concatenated: bool) -> GateFormula:
    """The one candidate: its constants read off three points. At g = −1 no clamp of the gate bites."""
    points = torch.tensor([0.0, _FAR], dtype=torch.float64, device="cpu")
    at_zero, far = _evaluate(module, torch.full_like(points, -1.0), points, is_concatenated).tolist()
    if at_zero == 0.0:
        limit = _clamp_seen(far / (-1.0 / (1.0 + math.e)))
        return GateFormula("clamped_silu", limit=limit) if limit else GateFormula("silu")
    sigmoid = -at_zero  # f(−1, 0) = −sigmoid(−alpha)
    alpha = _rounded(math.log(1.0 / sigmoid - 1.0))
    return GateFormula("swiglu_oai", alpha=alpha, limit=_clamp_seen(far / at_zero - 1.0))


def _clamp_seen(largest: float) -> float:
    """0 when the up projection passed through unclamped."""
    return 0.0 if largest > 0.99 * _FAR else _rounded(largest)


def _rounded(value: float) -> float:
    """Constants are short decimals; the measurement adds noise behind them."""
    return float(f"{value:.5g}")


def _around(formula: GateFormula) -> torch.Tensor:
    """The grid, with values just inside and outside the clamp."""
    if not formula.limit:
        return _GRID
    edges = torch.tensor([-1.01, -0.99, 0.99, 1.01], dtype=torch.float64, device="cpu") * formula.limit
    return torch.cat([_GRID, edges])


def _evaluate(module: nn.Module, gate: torch.Tensor, up: torch.Tensor, is_concatenated: bool) -> torch.Tensor:
    """`_apply_gate` on one row holding every (gate, up) pair, as float64 on the CPU."""
    pairs = torch.cat([gate, up]) if is_concatenated else torch.stack([gate, up], dim=-1).flatten()
    with torch.no_grad():
        result: torch.Tensor = module._apply_gate(pairs.unsqueeze(0))  # type: ignore[operator]
    return result.squeeze(0).to(torch.float64)
