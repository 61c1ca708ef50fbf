"""The blocks of GGUF files: our decoder against the `gguf` package's, on every bit pattern that files may hold."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize as reference
from numpy.typing import NDArray

from kt_kernel.errors import InputError
from kt_kernel.gguf import BLOCK_TYPES, dequantize, unpack
from kt_kernel.quantized import GROUPS, LEVELS

# Offsets of half-precision numbers in a block. The other bytes of these types may be anything.
_HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}


def random_blocks(name: str, channels: int, blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    """Random bytes whose half-precision scales are finite, subnormal ones among them."""
    rng = np.random.default_rng(seed)
    size = BLOCK_TYPES[name].bytes
    data = rng.integers(0, 256, (channels, blocks, size), dtype=np.uint8)
    for offset in _HALVES[name]:
        bits = rng.integers(0, 0x7C00, (channels, blocks), dtype=np.uint16)
        bits |= rng.integers(0, 2, (channels, blocks), dtype=np.uint16) << np.uint16(15)
        data[:, :, offset : offset + 2] = bits[..., None].view(np.uint8)
    if name == "MXFP4":
        data[:, :, 0] %= 250  # above, the largest codes overflow
    return data.reshape(channels, blocks * size)


def expected(name: str, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.asarray(reference(data, gguf.GGMLQuantizationType[name]), dtype=np.float32)


def same_bits(left: NDArray[np.float32], right: NDArray[np.float32]) -> bool:
    return left.shape == right.shape and bool((left.view(np.uint32) == right.view(np.uint32)).all())


def test_every_type_has_ggmls_sizes_and_levels_that_the_kernel_knows() -> None:
    assert set(BLOCK_TYPES) == set(_HALVES)
    for name, kind in BLOCK_TYPES.items():
        assert (kind.weights, kind.bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        assert kind.levels in LEVELS
        assert kind.group in GROUPS


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize(("channels", "blocks"), [(1, 1), (3, 5), (64, 7)])
def test_floats_are_those_of_the_gguf_package_bit_for_bit(name: str, channels: int, blocks: int) -> None:
    data = random_blocks(name, channels, blocks, seed=channels)
    assert same_bits(dequantize(name, data), expected(name, data))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_parts_put_together_are_the_floats_and_use_only_their_levels(name: str) -> None:
    data = random_blocks(name, 5, 9)
    matrix = unpack(name, data)
    assert same_bits(matrix.dequantize(), dequantize(name, data))
    assert set(np.unique(matrix.values).tolist()) <= set(LEVELS[matrix.levels])


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_threads_change_nothing(name: str) -> None:
    data = random_blocks(name, 600, 4)
    assert same_bits(dequantize(name, data, threads=1), dequantize(name, data, threads=3))


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
def test_bfloat16_is_rounded_once_to_the_nearest(name: str) -> None:
    torch = pytest.importorskip("torch")
    data = random_blocks(name, 4, 8)
    bits = torch.from_numpy(dequantize(name, data, bfloat16=True).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(bits, torch.from_numpy(dequantize(name, data)).to(torch.bfloat16))


def test_a_stack_of_matrices_keeps_its_shape() -> None:
    data = random_blocks("Q4_0", 12, 2).reshape(3, 4, -1)
    assert dequantize("Q4_0", data).shape == (3, 4, 64)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("Q9_9", np.zeros((1, 18), np.uint8), "Q9_9 are not decoded here; types: Q4_0"),
        ("Q4_0", np.zeros((1, 17), np.uint8), "17 bytes are no whole Q4_0 blocks of 18 bytes"),
        ("Q4_0", np.zeros((1, 18), np.int8), "contiguous uint8, got int8"),
        ("Q4_0", np.zeros((2, 36), np.uint8)[:, ::2], "contiguous uint8"),
    ],
)
def test_what_is_no_whole_block_is_refused(name: str, data: NDArray[np.uint8], words: str) -> None:
    with pytest.raises(InputError, match=words):
        dequantize(name, data)
