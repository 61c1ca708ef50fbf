"""Runs llvm-mca and reads its answer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CPU = "sapphirerapids"
# LLVM 17 is the first with a model of this CPU; before, Skylake's stood for it.
OLDEST, NEWEST = 17, 30
# Lengths of two simulations; their difference has no start in it.
FEW, MANY = 100, 300
LOAD_PORTS = ("p2", "p3", "p11")


class NotAvailable(Exception):
    """There is no llvm-mca that knows the CPU; the text names the package."""


@dataclass(frozen=True)
class Tool:
    path: str
    version: str


@dataclass(frozen=True)
class Throughput:
    """One pass in the steady state: its cycles, its micro-operations, and how long each port is busy."""

    cycles: float
    uops: float
    ports: Mapping[str, float]

    @property
    def busiest(self) -> str:
        return max(self.ports, key=lambda name: self.ports[name])

    @property
    def loads(self) -> float:
        """Cycles that the load ports are busy, evenly shared."""
        return sum(self.ports[name] for name in LOAD_PORTS) / len(LOAD_PORTS)


def total(parts: Sequence[tuple[float, Throughput]]) -> Throughput:
    """Several texts, each so many times, as if nothing overlapped in time but everything shared the ports."""
    ports = {name: sum(times * part.ports[name] for times, part in parts) for name in parts[0][1].ports}
    return Throughput(sum(t * part.cycles for t, part in parts), sum(t * part.uops for t, part in parts), ports)


def find() -> Tool:
    """The oldest llvm-mca that will do, so that machines agree; NotAvailable."""
    for name in [*(f"llvm-mca-{version}" for version in range(OLDEST, NEWEST)), "llvm-mca"]:
        path = shutil.which(name)
        if path is None:
            continue
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
        version = re.search(r"LLVM version ((\d+)\.\S+)", text)
        if version and int(version[2]) >= OLDEST:
            return Tool(path, version[1])
    raise NotAvailable(f"no llvm-mca of LLVM {OLDEST} or later (Debian: apt-get install llvm-19)")


def throughput(tool: Tool, text: str) -> Throughput:
    """Of a straight-line text (AT&T syntax) that repeats for ever."""
    few, many = _simulate(tool, text, FEW), _simulate(tool, text, MANY)
    cycles = (many["SummaryView"]["TotalCycles"] - few["SummaryView"]["TotalCycles"]) / (MANY - FEW)
    return Throughput(cycles, many["SummaryView"]["TotaluOps"] / MANY, _pressure(many))


def _simulate(tool: Tool, text: str, iterations: int) -> Mapping[str, Any]:
    done = subprocess.run(
        [tool.path, f"-mcpu={CPU}", f"-iterations={iterations}", "-json", "-"],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        raise ValueError(f"llvm-mca does not take the loop:\n{done.stderr[-1000:]}")
    answer = json.loads(done.stdout)
    region: dict[str, Any] = answer["CodeRegions"][0]
    return region | {"Resources": answer["TargetInfo"]["Resources"]}


def _pressure(region: Mapping[str, Any]) -> dict[str, float]:
    """Cycles a pass keeps each port busy."""
    names = [_short(name) for name in region["Resources"]]
    usage = dict.fromkeys(names, 0.0)
    sums = len(region["Instructions"])  # the row behind those of the instructions
    for entry in region["ResourcePressureView"]["ResourcePressureInfo"]:
        if entry["InstructionIndex"] == sums:
            usage[names[entry["ResourceIndex"]]] = entry["ResourceUsage"]
    return usage


def _short(name: str) -> str:
    """SPRPort05 -> p5."""
    match = re.search(r"Port(\d+)$", name)
    return f"p{int(match[1])}" if match else name
