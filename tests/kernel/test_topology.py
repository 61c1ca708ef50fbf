"""The bindings of the topology; the machines of every kind are in kernel/tests/test_topology.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest

from kt_kernel import _ext


@pytest.mark.parametrize(
    ("text", "cpus"), [("max 100000", None), ("50000 100000", 0.5), ("765000 100000", 7.65), ("200000 100000\n", 2.0)]
)
def test_cpu_max_of_cgroup_v2(text: str, cpus: float | None) -> None:
    assert _ext.parse_cgroup_cpu_max(text) == cpus


@pytest.mark.parametrize(("quota", "period", "cpus"), [("-1", "100000", None), ("50000\n", "100000\n", 0.5)])
def test_quota_of_cgroup_v1(quota: str, period: str, cpus: float | None) -> None:
    assert _ext.parse_cgroup_v1_quota(quota, period) == cpus


def test_text_that_is_no_quota_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="not a CPU quota: 'plenty'"):
        _ext.parse_cgroup_cpu_max("plenty")
    with pytest.raises(ValueError, match="not a CPU quota"):
        _ext.parse_cgroup_v1_quota("100000", "0")


@pytest.mark.parametrize(("quota", "threads"), [("50000 100000", 1), ("max 100000", None)])
def test_a_containers_quota_bounds_the_default(tmp_path: Path, quota: str, threads: int | None) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/box\n")
    (tmp_path / "cgroup" / "box").mkdir(parents=True)
    (tmp_path / "cgroup" / "box" / "cpu.max").write_text(quota)
    topology = _ext.topology(cgroup=str(tmp_path / "cgroup"), proc=str(tmp_path / "proc"))
    assert topology.default_threads == (threads or topology.physical_in_affinity)
    assert topology.numa_nodes >= 1
