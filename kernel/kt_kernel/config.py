"""The config dictionary of a wrapper, checked."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass

from kt_kernel.backends import Format
from kt_kernel.errors import ConfigError, did_you_mean
from kt_kernel.gate import GateFormula

__all__ = ["MoEConfig", "too_many_inputs"]

_REQUIRED = ("expert_num", "hidden_size", "intermediate_size", "max_len", "num_experts_per_tok")
_OPTIONAL = ("swiglu_alpha", "swiglu_limit")
_LARGEST = 2**31 - 1
# Inputs of one channel whose products the kernel adds up exactly (INT8, in 32 bits) or addresses.
_MOST_INPUTS: dict[Format, int] = {"INT8": 2**16, "BF16": 2**20, "INT4": 2**20, "FP8": 2**20}


@dataclass(frozen=True)
class MoEConfig:
    """Sizes and gate of one MoE layer. `max_len` sizes scratch memory and is no limit on tokens.

    Gate: `swiglu_alpha` 0 and `swiglu_limit` 0 = silu(g)·u; limit L > 0 clamps first (g ≤ L, |u| ≤ L); alpha > 0 =
    g·sigmoid(alpha·g)·(u + 1), clamped the same way when a limit is given.
    """

    expert_num: int
    hidden_size: int
    intermediate_size: int
    max_len: int
    num_experts_per_tok: int
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0

    @classmethod
    def from_dict(cls, config: Mapping[str, object]) -> MoEConfig:
        """Raises `ConfigError` that names every missing, unknown and impossible entry at once."""
        if not isinstance(config, Mapping):
            raise ConfigError(f"config is a dictionary with {', '.join(_REQUIRED)}; got {type(config).__name__}")
        problems = [f"{key!r} is missing" for key in _REQUIRED if key not in config]
        missing = [key for key in _REQUIRED + _OPTIONAL if key not in config]
        for key in config:
            if key not in _REQUIRED + _OPTIONAL:
                problems.append(f"unknown key {key!r}{did_you_mean(str(key), missing)}")
        sizes: dict[str, int] = {}
        for key in _REQUIRED:
            if key in config:
                try:
                    sizes[key] = _size(config[key])
                except ValueError as error:
                    problems.append(f"{key!r} {error}")
        gate: dict[str, float] = {}
        for key in _OPTIONAL:
            try:
                gate[key] = _non_negative(config.get(key, 0.0))
            except ValueError as error:
                problems.append(f"{key!r} {error}")
        top_k, experts = sizes.get("num_experts_per_tok", 0), sizes.get("expert_num", 0)
        if experts and top_k > experts:
            problems.append(f"'num_experts_per_tok' is {top_k}, more than the {experts} experts of 'expert_num'")
        if problems:
            raise ConfigError("config: " + "; ".join(problems))
        return cls(
            expert_num=experts,
            hidden_size=sizes["hidden_size"],
            intermediate_size=sizes["intermediate_size"],
            max_len=sizes["max_len"],
            num_experts_per_tok=top_k,
            swiglu_alpha=gate["swiglu_alpha"],
            swiglu_limit=gate["swiglu_limit"],
        )

    @property
    def gate(self) -> GateFormula:
        """The formula that `swiglu_alpha` and `swiglu_limit` stand for."""
        if self.swiglu_alpha > 0:
            return GateFormula(alpha=self.swiglu_alpha, limit=self.swiglu_limit, up_offset=1.0)
        return GateFormula(limit=self.swiglu_limit)

    def check_format(self, format: Format) -> None:
        """Raises `ConfigError` for sizes beyond what the format computes."""
        sizes = {"hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size}
        if problem := too_many_inputs(format, sizes):
            raise ConfigError(f"config: {problem}")

    def choose_gate(self, override: GateFormula | None) -> GateFormula:
        """`override`, or the config's own. Raises `ConfigError` when both say something."""
        if override is None:
            return self.gate
        if not isinstance(override, GateFormula):
            raise ConfigError(f"gate is {override!r}, a {type(override).__name__}; pass a kt_kernel.GateFormula")
        if self.swiglu_alpha or self.swiglu_limit:
            raise ConfigError(
                f"gate={override} and also swiglu_alpha={self.swiglu_alpha:g}, swiglu_limit={self.swiglu_limit:g} in "
                "the config: say it in one of the two places"
            )
        return override


def too_many_inputs(format: Format, sizes: Mapping[str, int]) -> str:
    """What is wrong with numbers of inputs beyond what a format computes; "" when nothing is."""
    most = _MOST_INPUTS[format]
    problems = [f"{name!r} is {size}" for name, size in sizes.items() if size > most]
    wider = max(_MOST_INPUTS, key=lambda name: _MOST_INPUTS[name])
    remedy = f"; a {wider} backend takes up to {_MOST_INPUTS[wider]}" if wider != format else ""
    return f"{', '.join(problems)}; {format} takes at most {most}{remedy}" if problems else ""


def _size(value: object) -> int:
    # bool is an int in Python and 8.0 equals 8; both are slips of the pen here.
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"is {value!r}, a {type(value).__name__}; it has to be a whole number, 1 or more")
    number = operator.index(value)
    if not 1 <= number <= _LARGEST:
        raise ValueError(f"is {number}; it has to be from 1 to {_LARGEST}")
    return number


def _non_negative(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"is {value!r}, a {type(value).__name__}; it has to be a number, 0 or more (0: not used)")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"is {value!r}; it has to be finite and 0 or more (0: not used)")
    return float(value)
