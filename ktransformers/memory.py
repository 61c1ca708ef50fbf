"""How much memory this process may still take: what the machine has free, and what its containers and limits leave."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["MemoryLimit", "memory_limits", "resident_bytes"]


@dataclass(frozen=True)
class MemoryLimit:
    """One thing that bounds memory, in bytes: `free` is what is left below it, `total` where it stands."""

    name: str
    total: int
    free: int


def memory_limits(
    proc: str | os.PathLike[str] = "/proc", cgroup: str | os.PathLike[str] = "/sys/fs/cgroup"
) -> list[MemoryLimit]:
    """Everything that bounds this process, the tightest first: the machine, every cgroup (v1 and v2) from the process's
    own to the root, `ulimit -v`.

    The roots are parameters so that a test can lay out a machine that is not here. Page cache counts as free: the
    system drops it when memory is wanted.
    """
    found = [_machine(Path(proc)), *_cgroups(Path(proc), Path(cgroup))]
    if (limit := _address_space()) is not None:
        found.append(limit)
    return sorted(found, key=lambda limit: limit.free)


def resident_bytes() -> int:
    """What this process has in memory now."""
    return int(psutil.Process().memory_info().rss)


def _machine(proc: Path) -> MemoryLimit:
    entries = _numbers(proc / "meminfo")
    if "MemTotal:" in entries and "MemAvailable:" in entries:
        return MemoryLimit("this machine", entries["MemTotal:"] << 10, entries["MemAvailable:"] << 10)  # kB
    memory = psutil.virtual_memory()
    return MemoryLimit("this machine", memory.total, memory.available)


def _cgroups(proc: Path, root: Path) -> Iterator[MemoryLimit]:
    """Of every cgroup around this process that has a limit below what could ever be."""
    seen = set()
    for controllers, path in _memberships(proc):
        # A container sees its own cgroup as the root, whatever its path is called outside.
        mounts = [root, root / "unified"] if not controllers else [root / controllers, root / "memory"]
        for mount in mounts:
            for folder in _upwards(mount, path):
                limit = _v2(folder) if not controllers else _v1(folder)
                if limit is not None and folder not in seen:
                    seen.add(folder)
                    yield limit


def _memberships(proc: Path) -> list[tuple[str, str]]:
    """(controllers, path) of the hierarchies that manage memory: v2 has no controllers. The mounts themselves too."""
    groups = [("", "/"), ("memory", "/")]
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if path and (not controllers or "memory" in controllers.split(",")):
            groups.append((controllers, path))
    return groups


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _v2(folder: Path) -> MemoryLimit | None:
    # Above memory.high a process is slowed down until it hardly moves: it is a limit too.
    bounds = [bound for name in ("memory.max", "memory.high") if (bound := _number(folder / name)) is not None]
    used = _number(folder / "memory.current")
    stat = _numbers(folder / "memory.stat")
    cache = stat.get("inactive_file", 0) + stat.get("active_file", 0)
    return _limit(folder, min(bounds, default=None), used, cache)


def _v1(folder: Path) -> MemoryLimit | None:
    bound, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    stat = _numbers(folder / "memory.stat")
    cache = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
    return _limit(folder, bound, used, cache)


def _limit(folder: Path, bound: int | None, used: int | None, cache: int) -> MemoryLimit | None:
    # v1 writes a number near 2^63 for no limit.
    if bound is None or bound >= 1 << 60:
        return None
    return MemoryLimit(f"the cgroup {folder}", bound, max(0, bound - max(0, (used or 0) - cache)))


def _address_space() -> MemoryLimit | None:
    bound, _ = resource.getrlimit(resource.RLIMIT_AS)
    if bound == resource.RLIM_INFINITY:
        return None
    return MemoryLimit("ulimit -v", bound, max(0, bound - int(psutil.Process().memory_info().vms)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """None for "max", and for a file that is not there."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _numbers(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdecimal()}
