"""Device names in rule files: spelt right, and on this host or replaced by the CPU with one line that says so."""

from __future__ import annotations

import difflib
import re

import torch

from ktransformers.errors import DeviceError
from ktransformers.log import warn_once

__all__ = ["ResolvedDevice", "available", "parse", "resolve"]

_KINDS = ("cpu", "cuda", "xpu", "mps", "npu")
_SPELLING = re.compile(r"(?P<kind>[a-z]+)(?::(?P<index>\d+))?")


class ResolvedDevice:
    """A device asked for and the one that serves it.

    Attributes:
        asked: as written in the rule.
        device: what runs. The CPU when the host has no such device.
        fell_back: whether the two differ in kind.
    """

    __slots__ = ("asked", "device", "fell_back")

    def __init__(self, asked: str, device: torch.device, *, fell_back: bool) -> None:
        self.asked = asked
        self.device = device
        self.fell_back = fell_back

    def __repr__(self) -> str:
        return f"{self.asked} → {self.device}" if self.fell_back else str(self.device)


def parse(name: object) -> torch.device:
    """`"cuda:1"` → `torch.device`. `DeviceError` with the nearest names for anything else than a known kind and an
    index.
    """
    if isinstance(name, torch.device):
        return name
    found = _SPELLING.fullmatch(name) if isinstance(name, str) else None
    if found is None or found["kind"] not in _KINDS:
        near = difflib.get_close_matches(str(name).lower(), _KINDS, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise DeviceError(
            f"{name!r} is no device.{hint} A device is one of {', '.join(_KINDS)}, or one with an index: cuda:0."
        )
    if found["kind"] == "cpu" and found["index"] not in (None, "0"):
        raise DeviceError(f"{name!r} is no device: the CPU is one device, written cpu.")
    # An index the host lacks is for `resolve` to say; torch.device accepts any.
    return torch.device("cpu") if found["kind"] == "cpu" else torch.device(str(name))


def available(device: torch.device) -> bool:
    """Whether this host has a device of that kind and index."""
    if device.type == "cpu":
        return True
    backend = getattr(torch, device.type, None)
    if backend is None or not backend.is_available():
        return False
    return device.index is None or device.index < int(backend.device_count())


def resolve(name: object, *, strict: bool = False) -> ResolvedDevice:
    """The device to use for the one a rule asks for.

    A kind this host lacks becomes the CPU, with one warning line per process and kind; `strict` makes it a
    `DeviceError`. An
    index beyond the devices of a kind the host has is always an error: it is a mistake in the rule, not a smaller host.
    """
    device = parse(name)
    if available(device):
        return ResolvedDevice(str(name), device, fell_back=False)
    if available(torch.device(device.type)):
        count = int(getattr(torch, device.type).device_count())
        raise DeviceError(f"{name} was asked for, and this host has {count} {device.type} device(s), counted from 0.")
    missing = f"{device.type} was asked for, and this host has none (torch {torch.__version__})"
    if strict:
        raise DeviceError(f"{missing}; devices are strict, so the CPU does not take its place.")
    warn_once(f"{missing}: the CPU takes its place.", key=f"device:{device.type}")
    return ResolvedDevice(str(name), torch.device("cpu"), fell_back=True)
