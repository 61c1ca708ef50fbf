"""What routers hand over: ids of every kind, batches of every size, weights that are not numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kt_kernel import InputError, MoEWrapper
from tests.kernel.layers import BOUND, FORMATS, TIER_FORMATS, Kernel, make_input, make_layer, relative_error, same_bits

LAYER = make_layer(6, 48, 40)


def _check(ids: Any, format: str = "INT8", tier: str | None = None, **options: Any) -> Any:
    ids = np.asarray(ids)
    x, _, weights = make_input(LAYER, ids.shape[0], ids.shape[1])
    got = Kernel(LAYER, format, tier, top_k=ids.shape[1], **options)(x, ids, weights)
    assert relative_error(got, LAYER.reference(x, ids, weights)) <= BOUND[format] * 1.5
    return got


@pytest.mark.parametrize(("tier", "format"), TIER_FORMATS)
def test_ids_outside_the_experts_contribute_nothing(tier: str, format: str) -> None:
    _check([[0, -1], [6, 3], [-1, 6], [5, 1], [6515, -7], [2**31 - 1, 4], [-(2**31), 0]], format, tier)
    _check([[0, 2**40], [-(2**40), 3], [2**32 + 1, 5], [2**63 - 1, -(2**63)]], format, tier)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("sentinel", [-1, 6])
def test_a_batch_that_is_routed_nowhere_is_zero(format: str, sentinel: int) -> None:
    kernel = Kernel(LAYER, format, top_k=2, threads=2)
    for tokens in (1, 9):
        x, _, weights = make_input(LAYER, tokens, 2)
        for _ in range(200):
            out = kernel(x, np.full((tokens, 2), sentinel), weights)
            assert out.shape == (tokens, 48)
            assert not out.any()


@pytest.mark.parametrize(("tier", "format"), TIER_FORMATS)
def test_duplicate_ids_add_up(tier: str, format: str) -> None:
    _check([[3, 3], [0, 0], [1, 3]], format, tier)
    _check([[0, 1, 0, 1, 2, 2], [5, 5, 5, 5, 5, 5]], format, tier)


@pytest.mark.parametrize("format", FORMATS)
def test_all_experts_for_every_token(format: str) -> None:
    _check(np.tile(np.arange(6), (11, 1)), format)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("expert", [0, 5])
def test_all_tokens_to_one_expert_leaves_the_others_empty(format: str, expert: int) -> None:
    _check(np.full((40, 1), expert), format, threads=3)


@pytest.mark.parametrize("format", FORMATS)
def test_no_tokens_give_no_rows_of_the_right_dtype(format: str) -> None:
    wrapper = MoEWrapper(LAYER.config(2), backend=format, threads=2)
    wrapper.load_weights(LAYER.weights())
    for dtype in (np.float32, np.float16):
        out = wrapper.forward(np.empty((0, 48), dtype), np.empty((0, 2), np.int32), np.empty((0, 2), np.float32))
        assert (out.shape, out.dtype) == ((0, 48), dtype)
    assert wrapper.submit(
        np.empty((0, 48), np.float32), np.empty((0, 2), int), np.empty((0, 2), dtype)
    ).result().shape == (0, 48)


def test_more_routed_rows_than_sixteen_bits_count() -> None:
    layer = make_layer(8, 16, 8)
    x, ids, weights = make_input(layer, 9000, 8)
    got = Kernel(layer, "INT8", top_k=8, threads=2, max_len=9000)(x, ids, weights)
    assert relative_error(got, layer.reference(x, ids, weights)) <= BOUND["INT8"]
    some = slice(8990, None)
    assert same_bits(Kernel(layer, "INT8", top_k=8)(x[some], ids[some], weights[some]), got[some])


@pytest.mark.parametrize("format", FORMATS)
def test_random_routings_with_holes_and_repeats(format: str) -> None:
    rng = np.random.default_rng(0)
    kernel = Kernel(LAYER, format, top_k=3, threads=2)
    for tokens in rng.integers(1, 30, 60):
        x, _, weights = make_input(LAYER, int(tokens), 3)
        ids = rng.integers(-2, 9, (tokens, 3))
        assert relative_error(kernel(x, ids, weights), LAYER.reference(x, ids, weights)) <= BOUND[format] * 2


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 1], [2, 3], [4, 5], [1, 6515]], "expert id 6515 ≥ 6 at token 3, slot 1"),
        ([[0, 6]], "expert id 6 ≥ 6 at token 0, slot 1"),
        ([[0, 1], [-1, 2]], "expert id -1 < 0 at token 1, slot 0"),
        ([[7, 1], [-1, 8]], r"expert id 7 ≥ 6 at token 0, slot 0 \(3 such ids\)"),
    ],
)
def test_strict_ids_name_the_id_the_token_and_the_slot(ids: list[list[int]], message: str) -> None:
    wrapper = MoEWrapper(LAYER.config(2), backend="INT8", threads=1, strict_ids=True)
    wrapper.load_weights(LAYER.weights())
    x, _, weights = make_input(LAYER, len(ids), 2)
    with pytest.raises(InputError, match=message):
        wrapper.forward(x, np.array(ids), weights)
    assert wrapper.forward(x, np.zeros((len(ids), 2), int), weights).shape == x.shape


@pytest.mark.parametrize(("tier", "format"), TIER_FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_stays_in_its_row(tier: str, format: str, value: float) -> None:
    kernel = Kernel(LAYER, format, tier, top_k=2, threads=2)
    x, ids, weights = make_input(LAYER, 9, 2)
    clean = kernel(x, ids, weights)
    spoilt = x.copy()
    spoilt[4, 7] = value
    with np.errstate(invalid="ignore"):
        got = kernel(spoilt, ids, weights)
    others = np.arange(9) != 4
    assert same_bits(got[others], clean[others])
    assert not np.isfinite(got[4]).any()


@pytest.mark.parametrize(("tier", "format"), TIER_FORMATS)
def test_a_zero_row_gives_a_zero_row(tier: str, format: str) -> None:
    x, ids, weights = make_input(LAYER, 5, 2)
    x[2] = 0
    got = Kernel(LAYER, format, tier, top_k=2)(x, ids, weights)
    assert not got[2].any()
    assert got[[0, 1, 3, 4]].any(axis=1).all()


@pytest.mark.parametrize(("tier", "format"), TIER_FORMATS)
def test_an_expert_of_zeros_contributes_zeros(tier: str, format: str) -> None:
    layer = make_layer(3, 48, 40)
    for matrix in (layer.gate, layer.up, layer.down):
        matrix[1] = 0
    x, _, weights = make_input(layer, 4, 2)
    ids = np.array([[1, 1], [1, 0], [2, 1], [0, 2]])
    got = Kernel(layer, format, tier, top_k=2)(x, ids, weights)
    assert not got[0].any()
    assert relative_error(got, layer.reference(x, ids, weights)) <= BOUND[format]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.0, 1e-42])
def test_a_strange_routing_weight_touches_only_its_token(format: str, value: float) -> None:
    kernel = Kernel(LAYER, format, top_k=2, threads=2)
    x, ids, weights = make_input(LAYER, 9, 2)
    clean = kernel(x, ids, weights)
    weights[6] = value
    got = kernel(x, ids, weights)
    others = np.arange(9) != 6
    assert same_bits(got[others], clean[others])
    if np.isfinite(value):
        assert (np.abs(got[6]) <= 1e-38).all()
    else:
        assert not np.isfinite(got[6]).any()
