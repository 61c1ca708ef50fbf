"""`GateFormula`: what the kernel does between an expert's first products and its last."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kt_kernel import _ext
from kt_kernel.errors import ConfigError, did_you_mean

__all__ = ["ACTIVATIONS", "GateFormula"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


@dataclass(frozen=True)
class GateFormula:
    """activation(g)·(u + up_offset) of gate g and up u, or activation(u) where there is no gate.

    Attributes:
        activation: "silu" (x·sigmoid(alpha·x)), "gelu" (by the error function), "gelu_tanh", "relu", "relu2" (squared).
        gated: False for experts with an up and a down projection only.
        alpha: of silu; 1 otherwise.
        limit: above 0, g is cut to at most the limit and u to ±limit.
        limit_after: activation(g), in place of g, is cut.
        up_offset: added to u after the cut, 1 for gpt-oss.

    Raises `ConfigError` for what the kernel does not compute.
    """

    activation: str = "silu"
    gated: bool = True
    alpha: float = 1.0
    limit: float = 0.0
    limit_after: bool = False
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        if problems := _problems(self):
            raise ConfigError("gate: " + "; ".join(problems))

    def native(self) -> _ext.Gate:
        """The same for the C++ library."""
        return _ext.Gate(self.activation, self.gated, self.alpha, self.limit, self.limit_after, self.up_offset)


def _problems(gate: GateFormula) -> list[str]:
    problems = []
    if gate.activation not in ACTIVATIONS:
        hint = did_you_mean(str(gate.activation), ACTIVATIONS)
        problems.append(f"unknown activation {gate.activation!r}{hint}; there are {', '.join(ACTIVATIONS)}")
    problems += [
        f"{name} is {value!r}; it has to be True or False"
        for name, value in (("gated", gate.gated), ("limit_after", gate.limit_after))
        if not isinstance(value, bool)
    ]
    numbers = {"alpha": gate.alpha, "limit": gate.limit, "up_offset": gate.up_offset}
    strange = [name for name, value in numbers.items() if not _finite(value)]
    problems += [f"{name} is {numbers[name]!r}; it has to be a finite number" for name in strange]
    if strange:
        return problems
    if gate.alpha <= 0:
        problems.append(f"alpha is {gate.alpha!r}; it has to be above 0 (1: plain silu)")
    elif gate.alpha != 1 and gate.activation != "silu":
        problems.append(f"alpha is {gate.alpha!r}, which only silu has, not {gate.activation}")
    if gate.limit < 0:
        problems.append(f"limit is {gate.limit!r}; it has to be 0 (none) or more")
    if gate.limit_after and gate.limit == 0:
        problems.append("limit_after without a limit")
    if not gate.gated and (gate.limit or gate.up_offset):
        problems.append("limit and up_offset belong to a gate; there is none")
    return problems


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
