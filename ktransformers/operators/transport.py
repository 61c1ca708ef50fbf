"""How hidden states reach the CPU kernel and how its result gets back.

On the CPU nothing moves. From another device the inputs are copied into pinned host buffers, and the result is copied
back from one, without stalling the device's queue. Buffers are leased: one that is still being read or written is never
handed out twice.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = [
    "AcceleratorPolicy",
    "DevicePolicy",
    "DirectTransport",
    "HostBatch",
    "PinnedTransport",
    "Transport",
    "transport_for",
]


class Event(Protocol):
    """A point in a device's queue."""

    def synchronize(self) -> None:
        """Blocks until the device has passed it."""


class DevicePolicy(Protocol):
    """What a device other than the CPU has to do for `PinnedTransport`."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """A uint8 host buffer that the device copies from and to on its own."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy. Both tensors stay alive until an event recorded after it has passed."""

    def record(self) -> Event:
        """The end of the queue as it is now."""


class AcceleratorPolicy:
    """`DevicePolicy` of CUDA and its like: pinned memory, non-blocking copies, events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = getattr(torch, device.type)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def record(self) -> Event:
        event = self._module.Event()
        # The stream of this device, which need not be the process's current one.
        streams = getattr(self._module, "current_stream", None)
        event.record(*([] if streams is None else [streams(self._device)]))
        synchronizable: Event = event
        return synchronizable


@dataclass
class HostBatch:
    """Inputs as the kernel takes them, on the host: hidden (T, H), ids (T, k), weights (T, k)."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Transport(Protocol):
    """Brings a batch to the host and a result back."""

    defers: bool
    """Whether a result may be awaited later than the call, because the device has other work meanwhile."""

    def fetch(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> HostBatch:
        """The inputs on the host, complete when this returns."""

    def deliver(self, batch: HostBatch, result: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The result of `batch` on `device`, in order with that device's queue. The batch's memory is free
        afterwards.
        """

    def release(self, batch: HostBatch) -> None:
        """Gives the batch's memory back without delivering. Harmless when that has happened already."""


class DirectTransport:
    """The CPU's: nothing is copied."""

    defers = False

    def fetch(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> HostBatch:
        return HostBatch(hidden, ids, weights)

    def deliver(self, batch: HostBatch, result: torch.Tensor, device: torch.device) -> torch.Tensor:  # noqa: ARG002
        return result.to(device)

    def release(self, batch: HostBatch) -> None:
        """Nothing was leased."""


class _Arena:
    """One pinned buffer that grows; `take` gives it away as a tensor of any shape and dtype."""

    def __init__(self, policy: DevicePolicy) -> None:
        self._policy = policy
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        needed = math.prod(shape) * dtype.itemsize
        if needed > self._bytes.numel():
            self._bytes = self._policy.pinned(needed)
        return self._bytes[:needed].view(dtype).view(shape)


class _Lease:
    """The four arenas of one batch in flight, and the last copy that reads from them."""

    def __init__(self, policy: DevicePolicy) -> None:
        self.hidden, self.ids, self.weights, self.result = (_Arena(policy) for _ in range(4))
        self.last_copy: Event | None = None


@dataclass
class _PinnedBatch(HostBatch):
    lease: _Lease | None


class PinnedTransport:
    """Another device's. `policy` makes it testable where there is no such device."""

    defers = True

    def __init__(self, policy: DevicePolicy) -> None:
        self._policy = policy
        self._free: list[_Lease] = []
        self._lock = threading.Lock()

    def fetch(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> HostBatch:
        with self._lock:
            lease = self._free.pop() if self._free else _Lease(self._policy)
        if lease.last_copy is not None:
            lease.last_copy.synchronize()  # an arena may be dropped for a larger one: its last copy has to be over
        batch = _PinnedBatch(
            lease.hidden.take(hidden.shape, hidden.dtype),
            lease.ids.take(ids.shape, ids.dtype),
            lease.weights.take(weights.shape, weights.dtype),
            lease,
        )
        for target, source in ((batch.hidden, hidden), (batch.ids, ids), (batch.weights, weights)):
            self._policy.copy(target, source)
        self._policy.record().synchronize()
        return batch

    def deliver(self, batch: HostBatch, result: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert isinstance(batch, _PinnedBatch)
        assert batch.lease is not None, "a batch is delivered once"
        staged = batch.lease.result.take(result.shape, result.dtype)
        staged.copy_(result)
        landed = torch.empty(result.shape, dtype=result.dtype, device=device)
        self._policy.copy(landed, staged)
        batch.lease.last_copy = self._policy.record()
        self.release(batch)
        return landed

    def release(self, batch: HostBatch) -> None:
        assert isinstance(batch, _PinnedBatch)
        with self._lock:
            if batch.lease is not None:
                self._free.append(batch.lease)
                batch.lease = None


_transports: dict[torch.device, Transport] = {}


def transport_for(device: torch.device) -> Transport:
    """The process's transport of a device: layers share buffers, since one layer runs after another."""
    transport = _transports.get(device)
    if transport is None:
        made = DirectTransport() if device.type == "cpu" else PinnedTransport(AcceleratorPolicy(device))
        transport = _transports.setdefault(device, made)
    return transport
