"""Devices that are not the CPU, made of ordinary tensors."""

from __future__ import annotations

import torch


class LazyDevice:
    """A `DevicePolicy` whose queue runs as late as it may: a copy happens when an event behind it is awaited.

    Whoever reads or reuses memory too early meets NaN, or another call's numbers.
    """

    def __init__(self) -> None:
        self._queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._done = 0
        self.pinned_bytes = 0

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.pinned_bytes += nbytes
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)  # NaN in every float format

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._queue.append((target, source))

    def record(self) -> _Event:
        return _Event(self, len(self._queue))

    def run(self, until: int | None = None) -> None:
        """What the hardware would have done by now."""
        stop = len(self._queue) if until is None else until
        for target, source in self._queue[self._done : stop]:
            target.copy_(source)
        self._done = max(self._done, stop)


class _Event:
    def __init__(self, device: LazyDevice, position: int) -> None:
        self._device, self._position = device, position

    def synchronize(self) -> None:
        self._device.run(self._position)


class PromptDevice(LazyDevice):
    """The same, with every copy done at once: for code that reads results as one does on a stream."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        super().copy(target, source)
        self.run()
