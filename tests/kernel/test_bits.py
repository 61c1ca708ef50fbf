"""INT8 gives the same bits on every tier, for any thread count and any batch; BF16 for any thread count and batch."""

from __future__ import annotations

import numpy as np
import pytest

from kt_kernel import KernelError, _ext
from kt_kernel.layer_formats import LayerFormats
from tests.kernel.layers import FORMATS, TIER_FORMATS, TIERS, Kernel, make_input, make_layer, pack, same_bits

SHAPES = [(5, 1, 1), (3, 33, 7), (4, 72, 176), (6, 256, 96), (2, 512, 1407), (3, 1407, 40)]


@pytest.mark.parametrize(("experts", "hidden", "intermediate"), SHAPES)
@pytest.mark.parametrize("rotate", [True, False], ids=["rotated", "plain"])
def test_int8_bits_are_equal_on_every_tier(experts: int, hidden: int, intermediate: int, rotate: bool) -> None:
    layer = make_layer(experts, hidden, intermediate)
    x, ids, weights = make_input(layer, 21, 2)
    first, *others = (Kernel(layer, "INT8", tier, top_k=2, rotate=rotate)(x, ids, weights) for tier in TIERS)
    assert np.isfinite(first).all()
    for other in others:
        assert same_bits(other, first)


@pytest.mark.parametrize(("alpha", "limit"), [(0.0, 0.7), (1.702, 0.7), (1.702, 0.0)])
def test_int8_bits_are_equal_on_every_tier_for_every_gate(alpha: float, limit: float) -> None:
    layer = make_layer(4, 96, 72).with_gate(alpha, limit)
    x, ids, weights = make_input(layer, 17, 3)
    outputs = [Kernel(layer, "INT8", tier, top_k=3)(x, ids, weights) for tier in TIERS]
    assert all(same_bits(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize(("tier", "format"), TIER_FORMATS)
def test_bits_do_not_depend_on_the_number_of_threads(tier: str, format: str) -> None:
    layer = make_layer(6, 200, 136)
    for tokens in (1, 40):
        x, ids, weights = make_input(layer, tokens, 3)
        one, *others = (Kernel(layer, format, tier, top_k=3, threads=threads)(x, ids, weights) for threads in (1, 2, 5))
        assert all(same_bits(other, one) for other in others)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("intermediate", [12, 20, 28, 36])
def test_bits_do_not_depend_on_a_threads_share_of_odd_blocks(format: str, intermediate: int) -> None:
    layer = make_layer(4, 48, intermediate)
    x, ids, weights = make_input(layer, 18, 2)
    outputs = [Kernel(layer, format, top_k=2, threads=threads)(x, ids, weights) for threads in range(1, 8)]
    assert all(same_bits(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize(("tier", "format"), TIER_FORMATS)
@pytest.mark.parametrize("batch", [2, 7, 64])
def test_a_token_alone_and_in_a_batch_has_the_same_bits(tier: str, format: str, batch: int) -> None:
    layer = make_layer(5, 160, 104)
    kernel = Kernel(layer, format, tier, top_k=2, threads=2)
    x, ids, weights = make_input(layer, batch, 2)
    together = kernel(x, ids, weights)
    for token in range(0, batch, max(1, batch // 8)):
        alone = slice(token, token + 1)
        assert same_bits(kernel(x[alone], ids[alone], weights[alone]), together[alone])


@pytest.mark.parametrize(("tier", "format"), TIER_FORMATS)
@pytest.mark.parametrize("tokens", [65, 1000])
def test_more_tokens_than_max_len_are_cut_inside_with_equal_bits(tier: str, format: str, tokens: int) -> None:
    layer = make_layer(4, 48, 32)
    x, ids, weights = make_input(layer, tokens, 2)
    cut = Kernel(layer, format, tier, top_k=2, max_len=64)(x, ids, weights)
    assert same_bits(Kernel(layer, format, tier, top_k=2, max_len=tokens)(x, ids, weights), cut)


@pytest.mark.parametrize("format", FORMATS)
def test_stale_scratch_never_reaches_an_output(format: str) -> None:
    layer = make_layer(4, 72, 40)
    fresh, used = (Kernel(layer, format, top_k=2, threads=2) for _ in range(2))
    used(*make_input(layer, 64, 2, seed=1))
    for tokens in (1, 3, 17):
        x, ids, weights = make_input(layer, tokens, 2)
        used.moe.fill_scratch(0xFF)  # a NaN in every float
        assert same_bits(used(x, ids, weights), fresh(x, ids, weights))


@pytest.mark.parametrize("format", FORMATS)
def test_packed_bytes_depend_on_neither_tier_nor_threads_nor_order(format: str) -> None:
    layer = make_layer(5, 72, 40)
    first = bytes(pack(layer, format, "generic", _ext.Context(1)).bytes())
    for tier in TIERS:
        for threads in (1, 3):
            assert bytes(pack(layer, format, tier, _ext.Context(threads)).bytes()) == first
    assert bytes(pack(layer, format, TIERS[-1], _ext.Context(2), only=[4, 0, 2, 1, 3]).bytes()) == first


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("experts", "hidden", "intermediate"), [(1, 1, 1), (2, 3, 130), (3, 65, 17), (2, 129, 64), (1, 512, 513)]
)
def test_packing_and_unpacking_gives_the_weights_back(
    format: str, experts: int, hidden: int, intermediate: int
) -> None:
    layer = make_layer(experts, hidden, intermediate)
    packed = pack(layer, format, TIERS[-1], _ext.Context(2))
    for expert in range(experts):
        back = [np.empty_like(matrix[expert]) for matrix in (layer.gate, layer.up, layer.down)]
        packed.unpack_expert(expert, *(matrix.ctypes.data for matrix in back))
        for got, matrix in zip(back, (layer.gate, layer.up, layer.down), strict=True):
            # BF16 rounds to 8 bits; FP8 to 4, and below 2^-6 of a block's scale to units of 2^-9; INT8 to 254 steps
            # across the largest (rotated) weight of a channel.
            bound = {
                "BF16": np.abs(matrix[expert]) / 256,
                "FP8": np.abs(matrix[expert]) / 16 + np.abs(matrix[expert]).max() / 448 / 1024,
                "INT8": np.linalg.norm(matrix[expert], axis=1)[:, None] / 60,
            }[format]
            assert (np.abs(got - matrix[expert]) <= bound + 1e-7).all()


def test_packed_sizes_are_told() -> None:
    packed = pack(make_layer(3, 64, 32), "INT8", "generic", _ext.Context(1))
    assert (packed.experts, packed.hidden, packed.intermediate, packed.rotated) == (3, 64, 32, True)
    assert LayerFormats.of(packed) == LayerFormats.both("INT8")
    assert packed.nbytes == len(packed.bytes()) >= 3 * packed.bytes_per_expert
    assert packed.bytes_per_expert >= 3 * 64 * 32
    with pytest.raises(TypeError):
        packed.bytes()[0] = 1


@pytest.mark.parametrize("sizes", [(2**10, 2**16, 2**16), (2**31 - 1, 2**16, 2**16), (2**20, 2**20, 2**20)])
def test_weights_beyond_memory_or_the_format_are_an_exception_and_not_the_end(sizes: tuple[int, int, int]) -> None:
    with pytest.raises((MemoryError, KernelError)):
        LayerFormats.both("INT8").allocate(*sizes, rotate=True)


def test_a_huge_max_len_costs_nothing_until_the_tokens_come() -> None:
    layer = make_layer(4, 48, 32)
    x, ids, weights = make_input(layer, 5, 2)
    kernel = Kernel(layer, "INT8", top_k=2, max_len=2**31 - 1)
    assert same_bits(kernel(x, ids, weights), Kernel(layer, "INT8", top_k=2, max_len=1)(x, ids, weights))
    assert kernel.moe.scratch_bytes() < 2**24
