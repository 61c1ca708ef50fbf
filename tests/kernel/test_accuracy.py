"""The kernel against float64: every tier and format, shapes of every kind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kt_kernel import MoEWrapper
from tests.kernel.layers import (
    BOUND,
    FORMATS,
    TIER_FORMATS,
    Kernel,
    Layer,
    make_input,
    make_layer,
    relative_error,
)

ODD = [1, 2, 3, 7, 31, 33, 64, 72, 176]


def _check(layer: Layer, format: str, tier: str, tokens: int, top_k: int, seed: int = 0) -> None:
    x, ids, weights = make_input(layer, tokens, top_k, seed)
    got = Kernel(layer, format, tier, top_k=top_k)(x, ids, weights)
    expected, bound = layer.reference(x, ids, weights), BOUND[format]
    # The bound is one of averages. A few numbers may all be rounded the wrong way, or nearly cancel.
    smallest = min(layer.hidden, layer.intermediate)
    if smallest < 8 or tokens * top_k * smallest < 256:
        assert relative_error(got, expected, layer.size_without_cancellation(x, ids, weights)) <= 2 * bound
    else:
        assert relative_error(got, expected) <= bound * (1.4 if smallest < 64 or tokens * top_k < 16 else 1.0)


@pytest.mark.parametrize(("tier", "format"), TIER_FORMATS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    experts=st.integers(1, 9),
    hidden=st.one_of(st.sampled_from(ODD), st.integers(1, 300)),
    intermediate=st.one_of(st.sampled_from(ODD), st.integers(1, 300)),
    tokens=st.integers(1, 40),
    data=st.data(),
)
def test_any_shape_and_routing_is_within_the_bound(
    tier: str, format: str, experts: int, hidden: int, intermediate: int, tokens: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, experts), label="k")
    seed = data.draw(st.integers(0, 99), label="seed")
    _check(make_layer(experts, hidden, intermediate, seed), format, tier, tokens, top_k, seed)


@pytest.mark.parametrize(("tier", "format"), TIER_FORMATS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(1407, 33), (33, 1407), (176, 1407), (1408, 352), (512, 1024)])
def test_large_and_unaligned_sizes_are_within_the_bound(tier: str, format: str, hidden: int, intermediate: int) -> None:
    _check(make_layer(3, hidden, intermediate), format, tier, tokens=12, top_k=2)


@pytest.mark.parametrize(("tier", "format"), TIER_FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 15, 16, 17, 18, 31, 33, 47, 64, 65, 127])
def test_token_counts_around_every_block_size_are_within_the_bound(tier: str, format: str, tokens: int) -> None:
    for hidden, intermediate in ((40, 64), (96, 40), (64, 72)):
        _check(make_layer(2, hidden, intermediate), format, tier, tokens, top_k=1)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("experts", [1, 2, 3, 5, 7, 60, 61, 161])
def test_any_number_of_experts_with_up_to_nine_for_a_token(format: str, experts: int) -> None:
    layer, top_k = make_layer(experts, 32, 24), min(experts, 9)
    x, ids, weights = make_input(layer, 20, top_k)
    got = Kernel(layer, format, top_k=top_k)(x, ids, weights)
    assert relative_error(got, layer.reference(x, ids, weights)) <= BOUND[format]


@pytest.mark.parametrize(("tier", "format"), TIER_FORMATS)
@pytest.mark.parametrize(
    ("alpha", "limit"), [(0.0, 0.0), (0.0, 1.0), (0.0, 7.0), (1.702, 7.0), (1.702, 1.0), (1.702, 0.0)]
)
def test_every_gate_formula_with_clamps_that_bite(tier: str, format: str, alpha: float, limit: float) -> None:
    layer = make_layer(3, 96, 80)
    layer = replace(layer, gate=layer.gate * 3, up=layer.up * 3).with_gate(alpha, limit)
    x, ids, weights = make_input(layer, 24, 2)
    got = Kernel(layer, format, tier, top_k=2)(x, ids, weights)
    assert relative_error(got, layer.reference(x, ids, weights)) <= BOUND[format] * 1.5
    if limit == 1.0:
        unclamped = layer.with_gate(alpha, 0.0).reference(x, ids, weights)
        assert relative_error(got, unclamped) > 0.1


@pytest.mark.parametrize("alpha_limit", [(0.0, 0.0), (0.0, 1.0), (1.702, 7.0)])
def test_the_wrapper_takes_the_gate_from_its_config(alpha_limit: tuple[float, float]) -> None:
    layer = make_layer(3, 64, 48).with_gate(*alpha_limit)
    x, ids, weights = make_input(layer, 9, 2)
    wrapper = MoEWrapper(layer.config(2), backend="BF16", threads=1)
    wrapper.load_weights(layer.weights())
    assert relative_error(wrapper.forward(x, ids, weights), layer.reference(x, ids, weights)) <= BOUND["BF16"]


@pytest.mark.parametrize(("tier", "format"), TIER_FORMATS)
def test_outliers_of_ten_thousand_in_the_activations(tier: str, format: str) -> None:
    layer = make_layer(4, 256, 64)
    x, ids, weights = make_input(layer, 16, 2)
    x[::3, 17] = 1e4
    x[1::3, 200] = -1e4
    got = Kernel(layer, format, tier, top_k=2)(x, ids, weights)
    assert relative_error(got, layer.reference(x, ids, weights)) <= BOUND[format] * 1.5


def test_rotation_keeps_what_an_outlier_channel_would_cost() -> None:
    layer = make_layer(4, 256, 64)
    x, ids, weights = make_input(layer, 32, 2)
    x[:, 5] *= 50
    expected = layer.reference(x, ids, weights)
    rotated, plain = (
        relative_error(Kernel(layer, "INT8", top_k=2, rotate=rotate)(x, ids, weights), expected)
        for rotate in (True, False)
    )
    assert rotated <= BOUND["INT8"]
    assert plain > 1.5 * rotated


@pytest.mark.parametrize(("tier", "format"), TIER_FORMATS)
def test_one_hot_rows_and_extreme_weights_do_not_saturate(tier: str, format: str) -> None:
    layer = make_layer(2, 128, 64)
    signs = np.where(np.arange(128) % 2, 1.0, -1.0).astype(np.float32)
    layer = replace(
        layer, gate=np.broadcast_to(signs, layer.gate.shape).copy(), up=-np.broadcast_to(signs, layer.up.shape)
    )
    x = np.concatenate(
        [np.eye(128, dtype=np.float32)[:8] * 3, np.tile(signs, (2, 1)) / 16, np.tile(-signs, (2, 1)) / 16]
    )
    ids = np.tile(np.array([[0, 1]]), (len(x), 1))
    weights = np.ones((len(x), 2), np.float32)
    got = Kernel(layer, format, tier, top_k=2, rotate=False)(x, ids, weights)
    assert relative_error(got, layer.reference(x, ids, weights)) <= BOUND[format] * 1.5
