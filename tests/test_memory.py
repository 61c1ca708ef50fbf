"""What a process may still take, on machines laid out as folders."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ktransformers.memory import memory_limits, resident_bytes

_GIB = 1 << 30


def _lay_out(folder: Path, **files: str) -> Path:
    """Files by their path, `/` written as `__` and `.` as `_dot_`."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def _free(folder: Path) -> dict[str, int]:
    limits = memory_limits(folder / "proc", folder / "cgroup")
    assert [limit.free for limit in limits] == sorted(limit.free for limit in limits)
    return {limit.name.replace(f"{folder / 'cgroup'}", "C"): limit.free for limit in limits}


def _machine(folder: Path, free_gib: int = 40, cgroup: str = "") -> None:
    meminfo = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {free_gib << 20} kB\n"
    _lay_out(folder, proc__meminfo=meminfo, proc__self__cgroup=cgroup)


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path) -> None:
    _machine(tmp_path)
    assert _free(tmp_path) == {"this machine": 40 * _GIB}


def test_a_container_of_cgroup_v2_counts_and_page_cache_is_free(tmp_path: Path) -> None:
    _machine(tmp_path, cgroup="0::/\n")
    _lay_out(
        tmp_path,
        cgroup__memory_dot_max=str(8 * _GIB),
        cgroup__memory_dot_current=str(5 * _GIB),
        cgroup__memory_dot_stat=f"anon 1\nactive_file {_GIB}\ninactive_file {2 * _GIB}\n",
    )
    assert _free(tmp_path) == {"the cgroup C": 6 * _GIB, "this machine": 40 * _GIB}


def test_the_tightest_cgroup_on_the_way_to_the_root_decides(tmp_path: Path) -> None:
    _machine(tmp_path, cgroup="0::/user/job\n")
    _lay_out(
        tmp_path,
        cgroup__user__memory_dot_max=str(4 * _GIB),
        cgroup__user__memory_dot_current=str(3 * _GIB),
        cgroup__user__job__memory_dot_max="max",
        cgroup__user__job__memory_dot_high=str(6 * _GIB),
        cgroup__user__job__memory_dot_current=str(1 * _GIB),
    )
    assert list(_free(tmp_path).items())[:2] == [("the cgroup C/user", _GIB), ("the cgroup C/user/job", 5 * _GIB)]


def test_cgroup_v1_counts_and_its_no_limit_is_none(tmp_path: Path) -> None:
    _machine(tmp_path, cgroup="4:memory:/docker/abc\n1:cpu:/\n0::/\n")
    _lay_out(
        tmp_path,
        cgroup__memory__memory_dot_limit_in_bytes="9223372036854771712\n",
        cgroup__memory__memory_dot_usage_in_bytes="1\n",
        cgroup__memory__docker__abc__memory_dot_limit_in_bytes=f"{2 * _GIB}\n",
        cgroup__memory__docker__abc__memory_dot_usage_in_bytes=f"{3 * _GIB}\n",
        cgroup__memory__docker__abc__memory_dot_stat=f"total_inactive_file {2 * _GIB}\n",
    )
    assert _free(tmp_path) == {"the cgroup C/memory/docker/abc": _GIB, "this machine": 40 * _GIB}


@pytest.mark.parametrize("text", ["", "nonsense", "-5", "12 potatoes"])
def test_odd_files_set_no_limit(tmp_path: Path, text: str) -> None:
    _machine(tmp_path, cgroup=f"{text}\n0:\n::\n")
    _lay_out(tmp_path, cgroup__memory_dot_max=text, cgroup__memory__memory_dot_limit_in_bytes=text)
    assert _free(tmp_path) == {"this machine": 40 * _GIB}


def test_a_limit_on_the_address_space_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _machine(tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 50, resource.RLIM_INFINITY))
    limit = next(limit for limit in memory_limits(tmp_path / "proc", tmp_path / "cgroup") if limit.name == "ulimit -v")
    assert limit.total == 1 << 50
    assert 0 < limit.free < limit.total


def test_this_very_machine_answers() -> None:
    assert memory_limits()[0].free > 0
    assert resident_bytes() > 1 << 20


def test_it_does_not_wait_for_torch() -> None:
    script = "import sys, ktransformers.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
