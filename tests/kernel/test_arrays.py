from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kt_kernel import InputError, MoEWrapper
from kt_kernel.arrays import FLOATS, view
from tests.kernel.layers import make_input, make_layer, relative_error, same_bits

LAYER = make_layer(4, 48, 40)
X, IDS, WEIGHTS = make_input(LAYER, 6, 2)


@pytest.fixture(scope="module")
def moe() -> MoEWrapper:
    wrapper = MoEWrapper(LAYER.config(2), backend="INT8", threads=1)
    wrapper.load_weights(LAYER.weights())
    return wrapper


def _expected(moe: MoEWrapper) -> Any:
    return moe.forward(X, IDS, WEIGHTS)


def test_a_contiguous_array_is_not_copied() -> None:
    assert view(X, "x", FLOATS, contiguous=True).address == X.ctypes.data
    tensor = torch.from_numpy(X)
    assert view(tensor, "x", FLOATS, contiguous=True).address == tensor.data_ptr()


def test_output_is_of_the_inputs_library_and_dtype(moe: MoEWrapper) -> None:
    assert isinstance(_expected(moe), np.ndarray)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = moe.forward(torch.from_numpy(X).to(dtype), torch.from_numpy(IDS), torch.from_numpy(WEIGHTS))
        assert (out.dtype, tuple(out.shape), out.device.type) == (dtype, X.shape, "cpu")
    assert moe.forward(X.astype(np.float16), IDS, WEIGHTS).dtype == np.float16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_inputs_give_the_answer_of_the_rounded_numbers(moe: MoEWrapper, dtype: torch.dtype) -> None:
    x, weights = torch.from_numpy(X).to(dtype), torch.from_numpy(WEIGHTS).to(dtype)
    expected = moe.forward(x.float(), IDS, weights.float())
    assert torch.equal(moe.forward(x, IDS, weights), expected.to(dtype))


def test_int32_and_int64_ids_give_equal_bits(moe: MoEWrapper) -> None:
    assert same_bits(moe.forward(X, IDS.astype(np.int32), WEIGHTS), _expected(moe))


def test_strided_and_transposed_views_give_equal_bits(moe: MoEWrapper) -> None:
    expected = _expected(moe)
    wide = np.zeros((12, 96), np.float32)
    wide[::2, ::2] = X
    assert same_bits(moe.forward(wide[::2, ::2], IDS, WEIGHTS), expected)
    assert same_bits(moe.forward(np.asfortranarray(X), IDS, WEIGHTS), expected)
    assert same_bits(moe.forward(X[::-1].copy()[::-1], IDS, WEIGHTS), expected)
    column_ids, column_weights = np.ascontiguousarray(IDS.T).T, np.ascontiguousarray(WEIGHTS.T).T
    assert same_bits(moe.forward(X, column_ids, column_weights), expected)
    tensor = torch.from_numpy(np.ascontiguousarray(X.T)).t()
    assert not tensor.is_contiguous()
    assert same_bits(moe.forward(tensor, torch.from_numpy(IDS), torch.from_numpy(WEIGHTS)).numpy(), expected)


def test_unaligned_and_foreign_byte_order_arrays_are_copied(moe: MoEWrapper) -> None:
    buffer = np.zeros(X.nbytes + 1, np.uint8)
    unaligned = buffer[1:].view(np.float32).reshape(X.shape)
    unaligned[:] = X
    assert same_bits(moe.forward(unaligned, IDS, WEIGHTS), _expected(moe))
    assert relative_error(moe.forward(X.astype(">f4"), IDS.astype(">i8"), WEIGHTS), _expected(moe)) == 0


def test_read_only_input_is_enough(moe: MoEWrapper) -> None:
    frozen = X.copy()
    frozen.flags.writeable = False
    assert same_bits(moe.forward(frozen, IDS, WEIGHTS), _expected(moe))


def test_input_is_left_alone(moe: MoEWrapper) -> None:
    x, ids, weights = X.copy(), IDS.copy(), WEIGHTS.copy()
    moe.forward(x, ids, weights)
    assert same_bits(x, X)
    assert (ids == IDS).all()
    assert same_bits(weights, WEIGHTS)


def test_gradients_end_here_and_that_is_said_once(moe: MoEWrapper, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.from_numpy(X).requires_grad_()
    with caplog.at_level(logging.WARNING, "kt_kernel"):
        with torch.no_grad():
            assert not moe.forward(x, IDS, WEIGHTS).requires_grad
        assert caplog.messages == []
        for _ in range(2):
            assert not moe.forward(x, IDS, WEIGHTS).requires_grad
    assert len(caplog.messages) == 1
    assert "x requires gradients" in caplog.messages[0]


def test_a_view_that_negates_lazily_shows_its_numbers(moe: MoEWrapper) -> None:
    negated = torch._neg_view(torch.from_numpy(-X))
    assert negated.is_neg()
    assert same_bits(moe.forward(negated, IDS, WEIGHTS).numpy(), _expected(moe))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X.astype(np.float64), "x is float64; the kernel takes float32, bfloat16, float16"),
        (X.astype(np.int32), "x is int32"),
        (torch.from_numpy(X).double(), "x is float64"),
        (torch.from_numpy(X).to(torch.complex64), "x is complex64"),
        (X.tolist(), "x has to be a torch tensor or a numpy array, got list"),
        ({"x": X}, "x has to be a torch tensor or a numpy array, got dict"),
        (None, "x has to be a torch tensor or a numpy array, got NoneType"),
        (X[0], r"x has shape \(48,\); expected \(tokens, 48\)"),
        (X[:, :40], r"x has shape \(6, 40\); expected \(tokens, 48\), hidden_size being 48"),
        (X[None], r"x has shape \(1, 6, 48\)"),
        (torch.from_numpy(X).to("meta"), "x is on the meta device"),
        (torch.from_numpy(X).to_sparse(), "x has layout torch.sparse_coo"),
    ],
)
def test_an_input_the_kernel_cannot_take_is_refused_with_the_remedy(moe: MoEWrapper, x: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        moe.forward(x, IDS, WEIGHTS)


def _called_with_fakes(moe: MoEWrapper) -> None:
    with FakeTensorMode():
        moe.forward(torch.empty(6, 48), torch.zeros(6, 2, dtype=torch.long), torch.empty(6, 2))


def _called_while_everything_new_is_fake(moe: MoEWrapper) -> None:
    x, ids, weights = (torch.from_numpy(array) for array in (X, IDS, WEIGHTS))
    with FakeTensorMode(allow_non_fake_inputs=True):
        moe.forward(x, ids, weights)


def _called_in_vmap(moe: MoEWrapper) -> None:
    ids, weights = torch.from_numpy(IDS), torch.from_numpy(WEIGHTS)
    torch.vmap(lambda x: moe.forward(x, ids, weights))(torch.from_numpy(X)[None])


def _called_in_functionalize(moe: MoEWrapper) -> None:
    ids, weights = torch.from_numpy(IDS), torch.from_numpy(WEIGHTS)
    torch.func.functionalize(lambda x: moe.forward(x, ids, weights))(torch.from_numpy(X))


def _called_with_freed_memory(moe: MoEWrapper) -> None:
    x = torch.from_numpy(X).clone()
    x.untyped_storage().resize_(0)
    moe.forward(x, torch.from_numpy(IDS), torch.from_numpy(WEIGHTS))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "call",
    [
        _called_with_fakes,
        _called_while_everything_new_is_fake,
        _called_in_vmap,
        _called_in_functionalize,
        _called_with_freed_memory,
    ],
)
def test_a_tensor_without_memory_is_refused(moe: MoEWrapper, call: Callable[[MoEWrapper], None]) -> None:
    with pytest.raises(InputError, match="without memory of its own"):
        call(moe)


def test_an_ordinary_subclass_and_an_empty_tensor_are_taken(moe: MoEWrapper) -> None:
    class Tagged(torch.Tensor):
        pass

    ids, weights = torch.from_numpy(IDS), torch.from_numpy(WEIGHTS)
    out = moe.forward(torch.from_numpy(X).as_subclass(Tagged), ids, weights)
    assert same_bits(out.numpy(), _expected(moe))
    assert moe.forward(torch.empty(0, 48), ids[:0], weights[:0]).shape == (0, 48)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS.astype(np.int16), "expert_ids is int16; the kernel takes int64, int32"),
        (IDS.astype(np.float32), "expert_ids is float32"),
        (IDS > 0, "expert_ids is bool"),
        (IDS[:5], r"expert_ids has shape \(5, 2\); expected \(6, 2\)"),
        (IDS[:, :1], r"expert_ids has shape \(6, 1\); expected \(6, 2\)"),
        (IDS.ravel(), r"expert_ids has shape \(12,\)"),
    ],
)
def test_ids_the_kernel_cannot_take_are_refused(moe: MoEWrapper, ids: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        moe.forward(X, ids, WEIGHTS)


def test_routing_weights_of_another_shape_or_dtype_are_refused(moe: MoEWrapper) -> None:
    with pytest.raises(InputError, match=r"weights has shape \(6, 1\); expected \(6, 2\)"):
        moe.forward(X, IDS, WEIGHTS[:, :1])
    with pytest.raises(InputError, match="weights is float64"):
        moe.forward(X, IDS, WEIGHTS.astype(np.float64))
