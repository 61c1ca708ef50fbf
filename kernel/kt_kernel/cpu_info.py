"""What this machine can run, what will run, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kt_kernel import _ext, environment
from kt_kernel.backends import BACKENDS
from kt_kernel.tier import choose_tier, obstacles

__all__ = ["CpuInfo", "ThreadInfo", "TierRow", "cpu_info"]


@dataclass(frozen=True)
class TierRow:
    """One ISA tier. `chosen_for`: the formats that run on it when nothing else is asked for."""

    name: str
    formats: tuple[str, ...]
    compiled: bool
    cpu: bool
    os: bool
    capped: bool
    chosen_for: tuple[str, ...]
    why_not: str

    @property
    def usable(self) -> bool:
        return self.compiled and self.cpu and self.os and not self.capped


@dataclass(frozen=True)
class ThreadInfo:
    """The default number of worker threads and the limits it comes from."""

    default: int
    limited_by: str
    logical_cpus: int
    physical_cores: int
    affinity: tuple[int, ...]
    physical_in_affinity: int
    cgroup_quota: float | None
    numa_nodes: int


@dataclass(frozen=True)
class CpuInfo:
    """The whole picture. `features`: every CPU feature and OS state by name, as CPUID and XCR0 tell it."""

    name: str
    features: dict[str, bool]
    tiers: tuple[TierRow, ...]
    threads: ThreadInfo

    @property
    def chosen(self) -> dict[str, str]:
        """Format → tier that runs it when nothing else is asked for."""
        return {format: row.name for row in self.tiers for format in row.chosen_for}

    def as_dict(self) -> dict[str, Any]:
        """Plain values only, ready for JSON."""
        plain = asdict(self)
        plain["tiers"] = [{**asdict(row), "usable": row.usable} for row in self.tiers]
        plain["chosen"] = self.chosen
        return plain

    def __str__(self) -> str:
        lines = [self.name, "", f"{'tier':<13}{'compiled':<10}{'CPU':<6}{'OS':<6}{'runs':<12}why not"]
        for row in self.tiers:
            marks = f"{_yes(row.compiled):<10}{_yes(row.cpu):<6}{_yes(row.os):<6}"
            runs = " ".join(row.chosen_for) or ("possible" if row.usable else "no")
            lines.append(f"{row.name:<13}{marks}{runs:<12}{row.why_not}".rstrip())
        t = self.threads
        quota = "none" if t.cgroup_quota is None else f"{t.cgroup_quota:g} CPUs"
        lines += [
            "",
            f"threads: {t.default} ({t.limited_by})",
            f"  {t.physical_cores} physical cores, {t.logical_cpus} logical CPUs, {t.numa_nodes} NUMA node(s)",
            f"  affinity {_ranges(t.affinity)}: {t.physical_in_affinity} physical cores; cgroup quota: {quota}",
        ]
        return "\n".join(lines)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _ranges(numbers: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) → "0-2,5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def _thread_info() -> ThreadInfo:
    topology = _ext.topology()
    asked = environment.NUM_THREADS.get()
    default = topology.default_threads if asked is None else asked
    if asked is not None:
        limited_by = environment.NUM_THREADS.name
    elif default < topology.physical_in_affinity:
        limited_by = "cgroup quota"
    elif topology.physical_in_affinity < topology.physical_cores:
        limited_by = "affinity mask"
    else:
        limited_by = "physical cores"
    return ThreadInfo(
        default=default,
        limited_by=limited_by,
        logical_cpus=topology.logical_cpus,
        physical_cores=topology.physical_cores,
        affinity=tuple(topology.affinity),
        physical_in_affinity=topology.physical_in_affinity,
        cgroup_quota=topology.cgroup_quota,
        numa_nodes=topology.numa_nodes,
    )


def _tier_row(tier: _ext.TierInfo, chosen: dict[str, str]) -> TierRow:
    found = obstacles(tier)
    return TierRow(
        name=tier.name,
        formats=tuple(tier.formats),
        compiled=tier.compiled,
        cpu=not tier.missing_cpu,
        os=not tier.missing_os,
        capped=any(obstacle.kind == "environment" for obstacle in found),
        chosen_for=tuple(format for format, name in chosen.items() if name == tier.name),
        why_not="; ".join(obstacle.text for obstacle in found),
    )


def cpu_info() -> CpuInfo:
    """The machine and the environment as they are now. Raises `ConfigError` for a variable it cannot understand."""
    tiers = _ext.tiers()
    chosen: dict[str, str] = {name: choose_tier(BACKENDS[name], tiers=tiers).tier for name in ("INT8", "BF16")}
    return CpuInfo(
        name=_ext.cpu_name(),
        features=dict(_ext.cpu_features()),
        tiers=tuple(_tier_row(tier, chosen) for tier in tiers),
        threads=_thread_info(),
    )
