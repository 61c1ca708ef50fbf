"""Device names in rule files: spelt right, and on this host or replaced by the CPU with one line that says so."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

import torch

from ktransformers.errors import DeviceError
from ktransformers.log import warn_once

__all__ = ["DeviceName", "ResolvedDevice", "available", "landing_place", "parse", "resolve"]

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


@dataclass(frozen=True)
class DeviceName:
    """A device as a rule names it. torch has no device object for some kinds until their extension is imported."""

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


def parse(name: object) -> DeviceName:
    """`"cuda:1"` → its parts. `DeviceError` with the nearest names for anything else than a known kind and an index."""
    if isinstance(name, DeviceName):
        return name
    if isinstance(name, torch.device):
        return DeviceName(name.type, name.index)
    found = _SPELLING.fullmatch(name) if isinstance(name, str) else None
    if found is None or found["kind"] not in _KINDS:
        near = difflib.get_close_matches(str(name).lower(), _KINDS, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise DeviceError(
            f"{name!r} is no device.{hint} A device is one of {', '.join(_KINDS)}, or one with an index: cuda:0."
        )
    if found["kind"] == "cpu" and found["index"] not in (None, "0"):
        raise DeviceError(f"{name!r} is no device: the CPU is one device, written cpu.")
    index = None if found["kind"] == "cpu" or found["index"] is None else int(found["index"])
    return DeviceName(found["kind"], index)


def available(device: DeviceName) -> bool:
    """Whether this host has a device of that kind and index."""
    if device.type == "cpu":
        return True
    backend = getattr(torch, device.type, None)
    if backend is None or not backend.is_available():
        return False
    return device.index is None or device.index < int(backend.device_count())


def resolve(name: object, *, strict: bool = False) -> ResolvedDevice:
    """The device to use for the one a rule asks for.

    A kind this host lacks, or an index beyond the devices it has, becomes the CPU, with one warning line per process
    and kind or index; `strict` makes it a `DeviceError`. A rule file may name more GPUs than this host has.
    """
    device = parse(name)
    if available(device):
        return ResolvedDevice(str(name), torch.device(str(device)), fell_back=False)
    if available(DeviceName(device.type)):
        count = int(getattr(torch, device.type).device_count())
        missing, key = f"{device} was asked for, and this host has {count} {device.type} device(s), from 0", str(device)
    else:
        missing = f"{device.type} was asked for, and this host has none (torch {torch.__version__})"
        key = device.type
    if strict:
        raise DeviceError(f"{missing}; devices are strict, so the CPU does not take its place.")
    warn_once(f"{missing}: the CPU takes its place.", key=f"device:{key}")
    return ResolvedDevice(str(name), torch.device("cpu"), fell_back=True)


def landing_place(name: object, *, strict: bool = False) -> torch.device | None:
    """Where results are to land by an `out_device`; None, where the input came from, also when this host lacks it."""
    if name is None:
        return None
    place = resolve(name, strict=strict)
    return None if place.fell_back else place.device
