"""Which formula an experts module computes between its projections, found by computing it.

A class name says nothing about clamps, and a `hidden_act` of "silu" nothing about what surrounds it. So the module's
own `_apply_gate` (or, without a gate, its `act_fn`) is asked for a few numbers that give away the constants, and then
has to agree with the formula on a grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

__all__ = ["GateFormula", "recognise_gate"]

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}

# Gate and up values where formulas differ: tails, both sides of zero, neighbours of round clamp values.
_NEAR_ZERO = (-3.0, -1.25, -1.0, -0.5, -0.03, 0.0, 0.02, 0.5, 0.99, 1.01, 2.0, 3.0)
_TAILS = (-60.0, -20.0, -10.5, -7.01, -6.99, 6.99, 7.01, 9.5, 10.5, 20.0, 60.0)
_GRID = torch.tensor([*_NEAR_ZERO, *_TAILS], dtype=torch.float64, device="cpu")  # even under `torch.device("meta")`
_FAR = 1e6  # beyond any clamp a model uses
_NEAR = 0.008  # below any clamp a model uses
# Modules may go through float32 inside, where a small activation of a large g is what is left of a cancellation (gelu).
# Formulas differ by far more.
_RELATIVE, _ABSOLUTE, _CANCELLED = 1e-5, 1e-6, 2e-7


@dataclass(frozen=True)
class GateFormula:
    """What the kernel computes between the projections: activation(g)·(u + up_offset), or activation(u) ungated.

    The fields are those of `kt_kernel.GateFormula`: `silu` is x·sigmoid(alpha·x); with a limit above 0 the gate g is
    cut to at most that (with `limit_after` activation(g) in its place) and the up projection u to ±limit.
    """

    activation: str = "silu"
    gated: bool = True
    alpha: float = 1.0
    limit: float = 0.0
    limit_after: bool = False
    up_offset: float = 0.0

    def __call__(self, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
        """Gate and up of one shape; no gate where there is none."""
        if not self.gated:
            return self._activate(up)
        assert gate is not None
        if self.limit > 0:
            gate = gate if self.limit_after else gate.clamp(max=self.limit)
            up = up.clamp(min=-self.limit, max=self.limit)
        activated = self._activate(gate)
        if self.limit_after:
            activated = activated.clamp(max=self.limit)
        return activated * (up + self.up_offset)

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.alpha * x) if self.alpha != 1 else _ACTIVATIONS[self.activation](x)

    def __str__(self) -> str:
        """Such as `silu(g)·u` or `silu(g, alpha=1.702)·(u + 1), g ≤ 7, |u| ≤ 7`."""
        alpha = f", alpha={self.alpha:g}" if self.alpha != 1 else ""
        if not self.gated:
            return f"{self.activation}(u{alpha})"
        activated = f"{self.activation}(g{alpha})"
        up = f"(u {'+' if self.up_offset > 0 else '-'} {abs(self.up_offset):g})" if self.up_offset else "u"
        clamped = activated if self.limit_after else "g"
        limits = f", {clamped} ≤ {self.limit:g}, |u| ≤ {self.limit:g}" if self.limit else ""
        return f"{activated}·{up}{limits}"


def recognise_gate(module: nn.Module, *, is_concatenated: bool = True, has_gate: bool = True) -> GateFormula | None:
    """The formula behind `module._apply_gate` or `module.act_fn`, or None when the kernel has none that agrees with it.

    `is_concatenated`: gate and up come as two halves; otherwise they alternate. Works on a meta module: both compute
    with their argument only. A gate that needs parameters fails there, and is None too.
    """
    evaluate = _gated(module, is_concatenated) if has_gate else _ungated(module)
    try:
        return next((formula for formula in _candidates(evaluate, has_gate) if _agrees(evaluate, formula)), None)
    except Exception:
        # Whatever a foreign gate does not survive, it is no formula of ours.
        return None


_Evaluate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _gated(module: nn.Module, is_concatenated: bool) -> _Evaluate:
    """`_apply_gate` on one row holding every (gate, up) pair, as float64 on the CPU."""

    def evaluate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        pairs = torch.cat([gate, up]) if is_concatenated else torch.stack([gate, up], dim=-1).flatten()
        with torch.no_grad():
            result: torch.Tensor = module._apply_gate(pairs.unsqueeze(0))  # type: ignore[operator]
        return result.squeeze(0).to(torch.float64)

    return evaluate


def _ungated(module: nn.Module) -> _Evaluate:
    """`act_fn` of the up projection."""

    def evaluate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        with torch.no_grad():
            result: torch.Tensor = module.act_fn(up.unsqueeze(0))  # type: ignore[operator]
        return result.squeeze(0).to(torch.float64)

    return evaluate


def _candidates(evaluate: _Evaluate, has_gate: bool) -> Iterator[GateFormula]:
    """Formulas with the constants that a few points show; the grid decides between them."""
    # No clamp bites a gate of −1; where the activation is 0 there, one just above 0 shows the same constants.
    scale, offset, limit = _measure(evaluate, -1.0) if has_gate else (_at(evaluate, 0.0, -1.0), 0.0, 0.0)
    alpha = _alpha_seen(scale)
    if has_gate and scale == 0.0:
        scale, offset, limit = _measure(evaluate, _NEAR)
    plain = GateFormula(gated=has_gate, limit=limit, up_offset=offset)
    formulas = [replace(plain, activation=name) for name in _ACTIVATIONS]
    if alpha not in (0.0, 1.0):
        formulas.append(replace(plain, alpha=alpha))
    for formula in formulas:
        yield formula
        if limit:
            yield replace(formula, limit_after=True)


def _measure(evaluate: _Evaluate, gate: float) -> tuple[float, float, float]:
    """activation(gate), the offset of up and the clamp of up (0: none), from f(gate, u) = activation(gate)·(u + o)."""
    zero, below, above, far = (_at(evaluate, gate, up) for up in (0.0, -_NEAR, _NEAR, _FAR))
    scale = (above - below) / (2 * _NEAR)
    if scale == 0.0:
        return 0.0, 0.0, 0.0
    offset = _rounded(zero / scale, digits=4)
    scale = zero / offset if offset else above / _NEAR
    largest = far / scale - offset
    return scale, offset, 0.0 if largest > 0.99 * _FAR else _rounded(largest)


def _at(evaluate: _Evaluate, gate: float, up: float) -> float:
    point = torch.full((1,), 1.0, dtype=torch.float64, device="cpu")
    return float(evaluate(gate * point, up * point))


def _alpha_seen(at_minus_one: float) -> float:
    """alpha, if −sigmoid(−alpha) is the number; 0 when none makes it."""
    return _rounded(math.log(-1.0 / at_minus_one - 1.0)) if -0.5 < at_minus_one < 0.0 else 0.0


def _rounded(value: float, digits: int = 5) -> float:
    """Constants are short decimals; the measurement adds noise behind them."""
    return float(f"{value:.{digits}g}")


def _agrees(evaluate: _Evaluate, formula: GateFormula) -> bool:
    gate, up = (side.flatten() for side in torch.meshgrid(_around(formula), _around(formula), indexing="ij"))
    got, wanted = evaluate(gate, up), formula(gate, up)
    if got.shape != wanted.shape:
        return False
    uncancelled = gate.abs() * (up.abs() + abs(formula.up_offset)) if formula.gated else up.abs()
    tolerance = _RELATIVE * wanted.abs() + _ABSOLUTE + _CANCELLED * uncancelled
    return bool(((got - wanted).abs() <= tolerance).all())


def _around(formula: GateFormula) -> torch.Tensor:
    """The grid, with values just inside and outside the clamp."""
    if not formula.limit:
        return _GRID
    edges = torch.tensor([-1.01, -0.99, 0.99, 1.01], dtype=torch.float64, device="cpu") * formula.limit
    return torch.cat([_GRID, edges])
