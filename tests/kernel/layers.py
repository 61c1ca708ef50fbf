"""Small MoE layers with random weights, their float64 answer, and the bare kernel on a chosen tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kt_kernel import MoEConfig, _ext
from kt_kernel.arrays import FLOATS, INTEGERS, view
from kt_kernel.layer_formats import LayerFormats

Floats = NDArray[np.floating[Any]]
Ids = NDArray[np.integer[Any]]

TIERS = [tier.name for tier in _ext.tiers() if tier.compiled and not tier.missing_cpu and not tier.missing_os]
"""The tiers this machine can run, ascending; `generic` is always the first."""
FORMATS = ("INT8", "BF16", "FP8")
# Formats whose error against the float weights is bounded; tests/kernel/test_grouped.py has the others.
TIER_FORMATS = [(tier.name, format) for tier in _ext.tiers() if tier.name in TIERS for format in FORMATS]
BEST = {format: tier.name for tier in _ext.tiers() if tier.name in TIERS for format in tier.formats}
"""Format → its highest tier here."""
BOUND = {"INT8": 0.02, "BF16": 0.006, "FP8": 0.07}
"""Largest relative L2 error against float64 on Gaussian weights."""


@dataclass(frozen=True)
class Layer:
    """gate, up (E, I, H) and down (E, H, I), float32, scaled so that activations keep their size."""

    gate: NDArray[np.float32]
    up: NDArray[np.float32]
    down: NDArray[np.float32]
    alpha: float = 0.0
    limit: float = 0.0

    @property
    def experts(self) -> int:
        return int(self.gate.shape[0])

    @property
    def hidden(self) -> int:
        return int(self.gate.shape[2])

    @property
    def intermediate(self) -> int:
        return int(self.gate.shape[1])

    def weights(self) -> dict[str, NDArray[np.float32]]:
        return {"gate_proj": self.gate, "up_proj": self.up, "down_proj": self.down}

    def config(self, top_k: int, max_len: int = 64) -> dict[str, object]:
        return {
            "expert_num": self.experts,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_len": max_len,
            "num_experts_per_tok": top_k,
            "swiglu_alpha": self.alpha,
            "swiglu_limit": self.limit,
        }

    def with_gate(self, alpha: float, limit: float) -> Layer:
        return replace(self, alpha=alpha, limit=limit)

    def activate(self, gate: Floats, up: Floats) -> Floats:
        if self.limit > 0:
            gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
        if self.alpha > 0:
            return gate * _sigmoid(self.alpha * gate) * (up + 1)
        return gate * _sigmoid(gate) * up

    def reference(self, x: Floats, ids: Ids, weights: Floats) -> NDArray[np.float64]:
        """The answer in float64; ids outside 0…E-1 contribute nothing."""
        matrices = [m.astype(np.float64) for m in (self.gate, self.up, self.down)]
        return _weighted_sum(matrices, self.activate, x, ids, weights)

    def size_without_cancellation(self, x: Floats, ids: Ids, weights: Floats) -> float:
        """The L2 norm that the output would have if nothing in its sums cancelled.

        An output of a few numbers may be what is left of larger ones; its error is theirs.
        """
        matrices = [np.abs(m).astype(np.float64) for m in (self.gate, self.up, self.down)]
        return float(np.linalg.norm(_weighted_sum(matrices, np.multiply, np.abs(x), ids, np.abs(weights))))


def _weighted_sum(
    matrices: Sequence[Floats], activate: Callable[..., Floats], x: Floats, ids: Ids, weights: Floats
) -> NDArray[np.float64]:
    gate, up, down = matrices
    y = np.zeros((x.shape[0], down.shape[1]))
    for expert in range(len(gate)):
        tokens, slots = np.nonzero(ids == expert)
        if len(tokens):
            rows = x[tokens].astype(np.float64)
            out = activate(rows @ gate[expert].T, rows @ up[expert].T) @ down[expert].T
            np.add.at(y, tokens, weights[tokens, slots].astype(np.float64)[:, None] * out)
    return y


def _sigmoid(x: Floats) -> Floats:
    half: Floats = 0.5 * (1 + np.tanh(x / 2))  # does not overflow
    return half


def make_layer(experts: int, hidden: int, intermediate: int, seed: int = 0) -> Layer:
    rng = np.random.default_rng([seed, experts, hidden, intermediate])

    def gaussian(*shape: int) -> NDArray[np.float32]:
        scale = np.float32(1 / np.sqrt(shape[-1]))
        return rng.standard_normal(shape, dtype=np.float32) * scale

    return Layer(
        gate=gaussian(experts, intermediate, hidden),
        up=gaussian(experts, intermediate, hidden),
        down=gaussian(experts, hidden, intermediate),
    )


def make_input(
    layer: Layer, tokens: int, top_k: int, seed: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """x (T, H), distinct ids (T, k), positive weights (T, k)."""
    rng = np.random.default_rng([seed, tokens, top_k])
    x = rng.standard_normal((tokens, layer.hidden)).astype(np.float32)
    ids = np.argsort(rng.random((tokens, layer.experts)), axis=1)[:, :top_k]
    return x, ids.astype(np.int64), rng.random((tokens, top_k), dtype=np.float32) + 0.1


def relative_error(got: Any, expected: Floats, size: float = 0.0) -> float:
    """L2 error relative to the norm of `expected`, or to `size` when that is more; 0 when both are zero."""
    difference = float(np.linalg.norm(np.asarray(got, dtype=np.float64) - expected))
    return difference / max(float(np.linalg.norm(expected)), size) if difference else 0.0


class Kernel:
    """The compiled kernel on a tier of the test's choosing, past the wrappers."""

    def __init__(
        self,
        layer: Layer,
        format: str = "INT8",
        tier: str | None = None,
        *,
        top_k: int,
        threads: int = 1,
        max_len: int = 64,
        rotate: bool = True,
    ) -> None:
        tier = tier or BEST[format]
        self.context = _ext.Context(threads)
        self.packed = pack(layer, format, tier, self.context, rotate=rotate)
        gate = MoEConfig.from_dict(layer.config(top_k)).gate.native()
        self.moe = _ext.MoE(self.context, self.packed, tier, gate, top_k, max_len)

    def __call__(self, x: Floats, ids: Ids, weights: Floats) -> NDArray[np.float32]:
        arrays = [view(np.ascontiguousarray(a), "a", FLOATS + INTEGERS) for a in (x, ids, weights)]
        out = np.full((x.shape[0], self.packed.hidden), 777.0, dtype=np.float32)
        arguments: list[Any] = [
            item for array in (*arrays, view(out, "out", FLOATS)) for item in (array.address, array.dtype)
        ]
        self.moe.forward(x.shape[0], ids.shape[1], *arguments)
        return out


def pack(
    layer: Layer,
    format: str,
    tier: str,
    context: _ext.Context,
    *,
    rotate: bool = True,
    only: Sequence[int] | None = None,
) -> _ext.PackedExperts:
    packed = LayerFormats.both(format).allocate(layer.experts, layer.hidden, layer.intermediate, rotate=rotate)
    for expert in range(layer.experts) if only is None else only:
        arguments: list[Any] = []
        for matrix in (layer.gate[expert], layer.up[expert], layer.down[expert]):
            array = view(matrix, "w", FLOATS)
            arguments += [array.address, (array.strides[0], array.strides[1])]
        packed.pack_expert(context, tier, expert, *[*arguments, "float32"])
    return packed


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
