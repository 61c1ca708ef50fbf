"""A deferred result: free to carry around, awaited at the first use, impossible to read too early."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ktransformers.operators import experts_cpu
from ktransformers.operators.overlap import Completion, DeferredTensor
from ktransformers.operators.transport import PinnedTransport
from tests import models
from tests.operators.fakes import LazyDevice, PromptDevice
from tests.operators.layers import make_batch, make_experts, make_operator

CPU = torch.device("cpu")


class _Work:
    """A computation that notes whether it was asked for its result, or abandoned."""

    def __init__(self, tensor: torch.Tensor, error: Exception | None = None) -> None:
        self.tensor, self.error = tensor, error
        self.finished = self.abandoned = 0

    def finish(self) -> torch.Tensor:
        self.finished += 1
        if self.error is not None:
            raise self.error
        return self.tensor

    def abandon(self) -> None:
        self.abandoned += 1

    def deferred(self) -> DeferredTensor:
        return DeferredTensor(self.tensor.to("meta"), CPU, Completion(self.finish, self.abandon))


def _make_work(*shape: int) -> _Work:
    return _Work(torch.randn(*(shape or (4, 6))))


def test_shape_dtype_device_and_views_do_not_wait() -> None:
    work = _make_work(4, 6)
    deferred = work.deferred()
    seen = deferred.view(2, 2, 6).unsqueeze(0).squeeze(0).detach().reshape(4, 6).view(2, 2, 6)
    assert (seen.shape, seen.dtype, seen.device, seen.dim()) == (torch.Size([2, 2, 6]), torch.float32, CPU, 3)
    assert work.finished == 0
    assert torch.equal(seen + 0, work.tensor.view(2, 2, 6))
    assert work.finished == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + 1,
        lambda t: 1 + t,
        lambda t: torch.ones_like(t) + t,
        lambda t: t @ t.t(),
        lambda t: nn.functional.linear(t, torch.eye(6)),
        lambda t: torch.cat([t, t]),
        lambda t: t.to(torch.float64),
        lambda t: t.clone(),
        lambda t: t[1:3],
        lambda t: t.contiguous().sum(),
        lambda t: torch.tensor(t.sum().item()),
        lambda t: torch.where(t > 0, t, 0),
        lambda t: torch.zeros(4, 6).copy_(t),
        lambda t: torch.zeros(4, 6).index_add_(0, torch.arange(4), t),
        lambda t: t.add_(1),
        lambda t: torch.zeros(4, 6).add_(t, alpha=2),
        lambda t: t.view(2, 2, 6) * t.view(2, 2, 6),
        lambda t: copy.deepcopy(t + 0),
    ],
)
def test_every_use_sees_the_numbers(use: Callable[[Any], torch.Tensor]) -> None:
    work = _make_work(4, 6)
    wanted = use(work.tensor.clone())
    got = use(work.deferred())
    assert work.finished == 1
    torch.testing.assert_close(got + 0, wanted, rtol=0, atol=0)


def test_there_is_no_memory_to_read_before_the_result_is_there() -> None:
    with pytest.raises(RuntimeError):
        _make_work().deferred().untyped_storage().data_ptr()


def test_the_result_is_computed_once_for_all_views() -> None:
    work = _make_work(4, 6)
    deferred = work.deferred()
    halves = [deferred.view(8, 3), deferred.view(2, 12)]
    assert all(torch.equal(half + 0, work.tensor.view(half.shape)) for half in halves)
    assert work.finished == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_works_in_inference(mode: Callable[[], Any]) -> None:
    work = _make_work(4, 6)
    with mode():
        assert torch.equal(work.deferred().view(24) * 2, work.tensor.view(24) * 2)


def test_an_error_is_raised_at_the_use_and_again_at_the_next() -> None:
    deferred = _Work(torch.zeros(2), error=ValueError("worker")).deferred()
    for _ in range(2):
        with pytest.raises(ValueError, match="worker"):
            _ = deferred + 1


def test_a_result_nobody_asks_for_is_awaited_when_it_is_dropped() -> None:
    work = _make_work(4, 6)
    deferred = work.deferred()
    view = deferred.view(24)
    del deferred
    assert work.abandoned == 0
    del view
    assert (work.finished, work.abandoned) == (0, 1)


def test_a_result_that_was_used_is_not_abandoned() -> None:
    work = _make_work(4, 6)
    deferred = work.deferred()
    _ = deferred + 1
    del deferred
    assert (work.finished, work.abandoned) == (1, 0)


def test_results_through_pinned_buffers_equal_the_direct_ones() -> None:
    module = make_experts()
    kernel = make_operator(module, backend="INT8")._kernel
    assert kernel is not None
    device = LazyDevice()
    transport = PinnedTransport(device)
    batches = [make_batch(module, tokens, seed=tokens) for tokens in (1, 9, 3, 0, 33)]
    direct = [kernel.forward(*batch, CPU) for batch in batches]
    # All in flight at once, used in the opposite order.
    deferred = [kernel.forward(*batch, CPU, transport) for batch in batches]
    assert all(isinstance(tensor, DeferredTensor) for tensor in deferred)
    landed = [tensor.complete() for tensor in reversed(deferred)]  # type: ignore[attr-defined]
    device.run()
    assert all(torch.equal(got, want) for got, want in zip(reversed(landed), direct, strict=True))


def test_dropped_results_leave_the_next_ones_right() -> None:
    module = make_experts()
    kernel = make_operator(module, backend="INT8")._kernel
    assert kernel is not None
    device = LazyDevice()
    transport = PinnedTransport(device)
    batch = make_batch(module, 20)
    for seed in range(5):
        kernel.forward(*make_batch(module, 20, seed=seed + 1), CPU, transport)
    landed = kernel.forward(*batch, CPU, transport).complete()  # type: ignore[attr-defined]
    device.run()
    assert torch.equal(landed, kernel.forward(*batch, CPU))


def test_a_refused_call_gives_its_buffers_back() -> None:
    module = make_experts()
    kernel = make_operator(module)._kernel
    assert kernel is not None
    device = LazyDevice()
    transport = PinnedTransport(device)
    hidden, ids, weights = make_batch(module, 4)
    for _ in range(3):
        with pytest.raises(ValueError, match="expert_ids"):
            kernel.forward(hidden, ids.float(), weights, CPU, transport)
    spent = device.pinned_bytes
    kernel.forward(hidden, ids, weights, CPU, transport)
    assert device.pinned_bytes <= spent + ids.nbytes  # int64 ids are larger than float32 ones; the rest is reused


def test_the_shared_expert_is_launched_before_the_experts_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.make_deepseek_v3()
    block: Any = model.get_submodule("model.layers.1.mlp")
    experts = block.experts
    experts.config._experts_implementation = "eager"
    hidden = torch.randn(1, 6, 64)
    block.experts = make_operator(experts, backend="BF16")
    with torch.no_grad():
        direct = block(hidden)
    monkeypatch.setattr(experts_cpu, "transport_for", lambda _: PinnedTransport(PromptDevice()))
    order: list[str] = []
    block.shared_experts.register_forward_hook(lambda *_: order.append("shared expert launched"))
    complete = Completion.result

    def noted(self: Completion) -> torch.Tensor:
        order.append("experts awaited")
        return complete(self)

    monkeypatch.setattr(Completion, "result", noted)
    with torch.no_grad():
        overlapped = block(hidden)
    assert order[:2] == ["shared expert launched", "experts awaited"]
    assert torch.equal(overlapped, direct)
    assert type(overlapped) is torch.Tensor


@pytest.mark.parametrize("build", [models.make_deepseek_v3, models.make_qwen2_moe, models.make_mixtral])
def test_a_whole_model_computes_the_same_through_pinned_buffers(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    for name in models.moe_layers(model):
        model.set_submodule(name, make_operator(model.get_submodule(name), backend="INT8"))
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        direct = model(ids).logits
        monkeypatch.setattr(experts_cpu, "transport_for", lambda _: PinnedTransport(PromptDevice()))
        assert torch.equal(model(ids).logits, direct)
