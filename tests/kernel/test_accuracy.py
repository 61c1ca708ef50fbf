"""The kernel against float64: every tier and format, shapes of every kind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kt_kernel import MoEWrapper
from tests.kernel.error_bounds import worst_case
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

# From here on a relative L2 error is a statistic: numbers of the output times experts of each, and rows of weights so
# long that their extremes, which are the steps of INT8, are typical ones. Below, single roundings decide: see
# test_tiny_layers….
ENOUGH_NUMBERS = 8192
SHORTEST = 32
# INT8's step is the largest of a row's numbers / 127, and that grows with the row: 2 % is reached at some 1500 inputs
# of both products (docs/performance.md).
LONGEST = 640


def _check(layer: Layer, format: str, tier: str, tokens: int, top_k: int, seed: int = 0) -> None:
    """The error of as many batches together as make a statistic is within the bound."""
    kernel = Kernel(layer, format, tier, top_k=top_k)
    batches = -(-ENOUGH_NUMBERS // (tokens * top_k * min(layer.hidden, layer.intermediate)))
    got, expected = [], []
    for batch in range(batches):
        x, ids, weights = make_input(layer, tokens, top_k, 1000 * seed + batch)
        got.append(kernel(x, ids, weights))
        expected.append(layer.reference(x, ids, weights))
    assert relative_error(np.concatenate(got), np.concatenate(expected)) <= BOUND[format]


@pytest.mark.parametrize(("tier", "format"), TIER_FORMATS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    experts=st.integers(1, 9),
    hidden=st.one_of(st.sampled_from([32, 33, 64, 72, 176]), st.integers(SHORTEST, LONGEST)),
    intermediate=st.one_of(st.sampled_from([32, 33, 64, 72, 176]), st.integers(SHORTEST, LONGEST)),
    tokens=st.one_of(st.just(1), st.integers(1, 40)),
    data=st.data(),
)
def test_any_shape_and_routing_is_within_the_bound(
    tier: str, format: str, experts: int, hidden: int, intermediate: int, tokens: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, experts), label="k")
    seed = data.draw(st.integers(0, 99), label="seed")
    _check(make_layer(experts, hidden, intermediate, seed), format, tier, tokens, top_k, seed)


@pytest.mark.parametrize(("tier", "format"), TIER_FORMATS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    experts=st.integers(1, 5),
    sizes=st.tuples(st.integers(1, SHORTEST - 1), st.integers(1, 130)),
    hidden_is_tiny=st.booleans(),
    tokens=st.integers(1, 6),
    rotate=st.booleans(),
    data=st.data(),
)
def test_tiny_layers_are_within_what_the_roundings_allow(
    tier: str,
    format: str,
    experts: int,
    sizes: tuple[int, int],
    hidden_is_tiny: bool,
    tokens: int,
    rotate: bool,
    data: st.DataObject,
) -> None:
    hidden, intermediate = sizes if hidden_is_tiny else sizes[::-1]
    top_k = data.draw(st.integers(1, experts), label="k")
    seed = data.draw(st.integers(0, 99), label="seed")
    layer = make_layer(experts, hidden, intermediate, seed)
    x, ids, weights = make_input(layer, tokens, top_k, seed)
    got = Kernel(layer, format, tier, top_k=top_k, rotate=rotate)(x, ids, weights)
    off = np.abs(np.asarray(got, np.float64) - layer.reference(x, ids, weights))
    assert (off <= worst_case(layer, x, ids, weights, format, rotate=rotate)).all()


@pytest.mark.parametrize(("format", "least"), [("INT8", 0.02), ("BF16", 0.01)])
def test_what_the_roundings_allow_leaves_no_room_for_a_wrong_weight(format: str, least: float) -> None:
    layer = make_layer(1, 8, 8)
    x, ids, weights = make_input(layer, 6, 1)
    room = worst_case(layer, x, ids, weights, format, rotate=False)
    size = layer.size_without_cancellation(x, ids, weights)
    assert np.linalg.norm(room) <= least * size
    wrong = replace(layer, down=np.roll(layer.down, 1, axis=2)).reference(x, ids, weights)
    assert (np.abs(wrong - layer.reference(x, ids, weights)) > room).mean() > 0.8


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
