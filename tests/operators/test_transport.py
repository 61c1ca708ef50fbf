"""Pinned buffers: nothing is read before it has arrived, nothing is reused before it has left."""

from __future__ import annotations

import torch

from ktransformers.operators.transport import DirectTransport, PinnedTransport, transport_for
from tests.operators.fakes import LazyDevice

CPU = torch.device("cpu")


def _make_inputs(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, 8).to(dtype), torch.randint(0, 4, (tokens, 2)), torch.rand(tokens, 2)


def test_the_cpu_copies_nothing() -> None:
    hidden, ids, weights = _make_inputs(3)
    batch = DirectTransport().fetch(hidden, ids, weights)
    assert (batch.hidden is hidden, batch.ids is ids, batch.weights is weights) == (True, True, True)
    assert isinstance(transport_for(CPU), DirectTransport)


def test_inputs_have_arrived_when_fetch_returns() -> None:
    inputs = _make_inputs(5)
    batch = PinnedTransport(LazyDevice()).fetch(*inputs)
    for arrived, sent in zip((batch.hidden, batch.ids, batch.weights), inputs, strict=True):
        assert torch.equal(arrived, sent)


def test_inputs_that_are_not_contiguous_arrive_in_order() -> None:
    hidden, ids, weights = torch.randn(8, 5).t(), torch.randint(0, 4, (2, 5)).t(), torch.rand(2, 5).t()
    batch = PinnedTransport(LazyDevice()).fetch(hidden, ids, weights)
    assert torch.equal(batch.hidden, hidden)
    assert batch.hidden.is_contiguous()
    assert torch.equal(batch.ids, ids)
    assert torch.equal(batch.weights, weights)


def test_buffers_grow_are_reused_and_keep_results_apart() -> None:
    device = LazyDevice()
    transport = PinnedTransport(device)
    landed, wanted = [], []
    for tokens, dtype in (
        (2, torch.float32),
        (7, torch.bfloat16),
        (3, torch.float32),
        (40, torch.float16),
        (1, torch.float32),
    ):
        hidden, ids, weights = _make_inputs(tokens, dtype)
        batch = transport.fetch(hidden, ids, weights)
        landed.append(transport.deliver(batch, batch.hidden * 2, CPU))
        wanted.append(hidden * 2)
    device.run()
    assert all(torch.equal(got, want) for got, want in zip(landed, wanted, strict=True))


def test_equal_calls_allocate_once() -> None:
    device = LazyDevice()
    transport = PinnedTransport(device)
    sizes = []
    for _ in range(3):
        batch = transport.fetch(*_make_inputs(4))
        transport.deliver(batch, batch.hidden + 1, CPU)
        sizes.append(device.pinned_bytes)
    assert sizes[0] == sizes[1] == sizes[2] > 0


def test_two_batches_in_flight_do_not_share_memory() -> None:
    device = LazyDevice()
    transport = PinnedTransport(device)
    first_inputs, second_inputs = _make_inputs(4), _make_inputs(4)
    first, second = transport.fetch(*first_inputs), transport.fetch(*second_inputs)
    assert torch.equal(first.hidden, first_inputs[0])
    late = transport.deliver(second, second.hidden + 1, CPU)
    early = transport.deliver(first, first.hidden + 1, CPU)
    device.run()
    assert torch.equal(early, first_inputs[0] + 1)
    assert torch.equal(late, second_inputs[0] + 1)


def test_release_twice_does_not_lend_a_buffer_twice() -> None:
    transport = PinnedTransport(LazyDevice())
    batch = transport.fetch(*_make_inputs(4))
    transport.release(batch)
    transport.release(batch)
    one, two = transport.fetch(*_make_inputs(4)), transport.fetch(*_make_inputs(4))
    assert one.hidden.data_ptr() != two.hidden.data_ptr()


def test_an_empty_batch_travels() -> None:
    transport = PinnedTransport(LazyDevice())
    batch = transport.fetch(*_make_inputs(0))
    assert transport.deliver(batch, batch.hidden, CPU).shape == (0, 8)
