"""`LinearWrapper` against torch: shapes, dtypes, layouts, and what it refuses."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import kt_kernel
from kt_kernel import LinearWrapper

TOLERANCE = {"BF16": 0.006, "INT8": 0.02}


def _matrix(channels: int, inputs: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(channels * 1000 + inputs)
    weight = torch.randn(channels, inputs, generator=generator) / inputs**0.5
    return weight.to(dtype), torch.randn(channels, generator=generator).to(dtype)


def _made(weight: torch.Tensor, bias: torch.Tensor | None = None, **options: Any) -> LinearWrapper:
    wrapper = LinearWrapper(weight.shape[1], weight.shape[0], **options)
    wrapper.load_weights(weight, bias)
    return wrapper


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("backend", ["BF16", "INT8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(1, 1), (33, 65), (96, 64), (70, 300)])
def test_agrees_with_torch_in_every_dtype_with_and_without_bias(
    sizes: tuple[int, int], dtype: torch.dtype, backend: str
) -> None:
    weight, bias = _matrix(*sizes, dtype)
    x = torch.randn(5, sizes[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    for used in (None, bias):
        got = _made(weight, used, backend=backend).forward(x)
        wanted = torch.nn.functional.linear(x.double(), weight.double(), None if used is None else used.double())
        assert (got.dtype, got.shape) == (dtype, (5, sizes[0]))
        assert _error(got, wanted) < TOLERANCE[backend] + (0.004 if dtype is torch.bfloat16 else 0)


def _with_outliers(channels: int, inputs: int, seed: int) -> torch.Tensor:
    """As trained weights are: heavier tails than normal (Student-t, 5 degrees of freedom), a few channels and inputs of
    several times the usual size."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(6, channels, inputs, generator=generator)
    weight = normal[0] / normal[1:].square().mean(0).sqrt()
    weight[torch.randperm(channels, generator=generator)[: channels // 64]] *= 4
    weight[:, torch.randperm(inputs, generator=generator)[: inputs // 128]] *= 6
    return weight * 0.02


@pytest.mark.parametrize(("backend", "most"), [("INT4", 0.09), ("FP8", 0.04), ("INT8", 0.02), ("BF16", 0.006)])
@pytest.mark.parametrize("inputs", [704, 2048])
def test_weights_with_realistic_outliers_are_within_the_bars(backend: str, most: float, inputs: int) -> None:
    weight = _with_outliers(256, inputs, seed=inputs)
    x = torch.randn(64, inputs, generator=torch.Generator().manual_seed(1))
    x[:, :: inputs // 4] *= 20  # outlier inputs, as a model's activations have them
    error = _error(_made(weight, backend=backend).forward(x), x.double() @ weight.double().T)
    assert most / 10 < error < most


@pytest.mark.parametrize("shape", [(64,), (0, 64), (2, 0, 64), (2, 3, 64), (1, 2, 2, 64)])
def test_any_leading_dimensions(shape: tuple[int, ...]) -> None:
    weight, bias = _matrix(40, 64)
    wrapper = _made(weight, bias, backend="INT8")
    x = torch.randn(shape)
    got = wrapper.forward(x)
    assert got.shape == (*shape[:-1], 40)
    assert torch.equal(got.reshape(-1, 40), wrapper.forward(x.reshape(-1, 64)))


def test_strides_are_followed() -> None:
    weight, _ = _matrix(40, 64)
    wanted = _made(weight, backend="INT8").forward(torch.ones(1, 64))
    for same in (weight.t().contiguous().t(), torch.stack([weight, weight], dim=2)[:, :, 1]):
        assert not same.is_contiguous()
        assert torch.equal(_made(same, backend="INT8").forward(torch.ones(1, 64)), wanted)
    x = torch.randn(64, 6)
    wrapper = _made(weight, backend="INT8")
    assert torch.equal(wrapper.forward(x.t()), wrapper.forward(x.t().contiguous()))


def test_numpy_in_numpy_out() -> None:
    weight, bias = _matrix(40, 64)
    wrapper = LinearWrapper(64, 40, backend="INT8")
    wrapper.load_weights(weight.numpy(), bias.numpy().astype(np.float16))
    got = wrapper.forward(np.ones((3, 64), np.float32))
    assert isinstance(got, np.ndarray)
    assert got.shape == (3, 40)
    half = _made(weight, bias.half(), backend="INT8")
    assert np.array_equal(got, half.forward(torch.ones(3, 64)).numpy())


def test_int8_bits_are_equal_on_every_tier_thread_count_and_batch() -> None:
    weight, bias = _matrix(70, 130)
    x = torch.randn(21, 130)
    wanted = _made(weight, bias, backend="INT8", threads=1).forward(x)
    for backend in ("AVX2INT8", "AVX512INT8", "AMXINT8"):
        assert torch.equal(_made(weight, bias, backend=backend, threads=2).forward(x), wanted)
    wrapper = _made(weight, bias, backend="INT8", threads=3)
    assert torch.equal(torch.cat([wrapper.forward(row[None]) for row in x]), wanted)


def test_a_nan_stays_in_its_row() -> None:
    weight, _ = _matrix(40, 64)
    wrapper = _made(weight, backend="INT8")
    x = torch.randn(3, 64)
    wanted = wrapper.forward(x)
    x[1, 5] = torch.nan
    got = wrapper.forward(x)
    assert got[1].isnan().all()
    assert torch.equal(got[::2], wanted[::2])


def test_several_threads_may_call_one_wrapper() -> None:
    weight, _ = _matrix(96, 128)
    wrapper = _made(weight, backend="INT8", threads=2)
    batches = [torch.randn(n, 128) for n in range(1, 25)]
    wanted = [wrapper.forward(x) for x in batches]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(wrapper.forward, batches))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_it_says_what_it_is() -> None:
    weight, _ = _matrix(64, 64)
    wrapper = _made(weight, backend="INT8", threads=2)
    assert wrapper.description == f"INT8 → INT8 on {wrapper.tier}, 2 threads"
    assert LinearWrapper(64, 64, backend="INT8").packed_bytes() == wrapper.nbytes
    assert LinearWrapper(64, 64, backend="INT8").packed_bytes(biased=True) == wrapper.nbytes + 2 * 128
    assert wrapper.nbytes == 64 * 64 + 2 * 256  # two blocks, each with a trailer of scales and sums
    assert repr(wrapper).startswith("LinearWrapper(64 → 64; INT8 → INT8 on ")
    assert copy.deepcopy(wrapper).forward(torch.ones(1, 64)).shape == (1, 64)


def test_a_failed_load_leaves_the_weights_that_were_there() -> None:
    weight, _ = _matrix(40, 64)
    wrapper = _made(weight, backend="INT8")
    wanted = wrapper.forward(torch.ones(1, 64))
    broken = weight.clone()
    broken[33, 7] = torch.inf
    with pytest.raises(kt_kernel.WeightsError, match="linear weight at channel 33, input 7 is infinite"):
        wrapper.load_weights(broken)
    assert torch.equal(wrapper.forward(torch.ones(1, 64)), wanted)


@pytest.mark.parametrize(
    ("weight", "bias", "said"),
    [
        (torch.ones(4, 9), None, r"weight has shape \(4, 9\); expected \(4, 8\): out_features by in_features"),
        (torch.ones(4, 8), torch.ones(5), r"bias has shape \(5,\); expected \(4,\)"),
        (torch.ones(4, 8, dtype=torch.float64), None, "weight is float64; the kernel takes float32"),
        (torch.ones(4, 8, device="meta"), None, "weight is on the meta device"),
        ([[1.0] * 8] * 4, None, "weight has to be a torch tensor or a numpy array, got list"),
        (torch.ones(4, 8), torch.full((4,), torch.nan), "linear bias of channel 0 is NaN"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weight: Any, bias: Any, said: str) -> None:
    with pytest.raises(kt_kernel.WeightsError, match=said):
        LinearWrapper(8, 4).load_weights(weight, bias)


@pytest.mark.parametrize("x", [torch.ones(2, 9), torch.ones(()), torch.ones(2, 8, dtype=torch.int64), [1.0] * 8])
def test_inputs_that_do_not_fit_are_refused(x: Any) -> None:
    with pytest.raises(kt_kernel.InputError, match=r"x (has shape|is int64|has to be)"):
        _made(torch.ones(4, 8)).forward(x)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (True, 4), (4.0, 4), ("4", 4), (4, 2**31)])
def test_sizes_that_cannot_be_are_refused(sizes: tuple[Any, Any]) -> None:
    with pytest.raises(kt_kernel.ConfigError, match="it has to be a whole number"):
        LinearWrapper(*sizes)


def test_more_inputs_than_int8_adds_up_exactly_are_refused() -> None:
    with pytest.raises(kt_kernel.ConfigError, match="'in_features' is 65537; INT8 takes at most 65536; a BF16 backend"):
        LinearWrapper(65537, 4, backend="INT8")


def test_a_vocabulary_larger_than_that_is_fine() -> None:
    wrapper = _made(torch.ones(70_000, 1), backend="INT8")
    assert torch.equal(wrapper.forward(torch.ones(2, 1)), wrapper.forward(torch.ones(1, 1)).expand(2, -1))


def test_forward_before_weights_says_what_to_do() -> None:
    with pytest.raises(kt_kernel.NotLoadedError, match="call load_weights"):
        LinearWrapper(8, 4).forward(torch.ones(1, 8))
