"""`kt doctor`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import kt_kernel
from kt_kernel import _ext
from ktransformers.cli import diagnosis
from tests.cli.conftest import Kt


def test_it_shows_tiers_threads_memory_and_versions(kt: Kt) -> None:
    result = kt("doctor")
    for tier in _ext.tiers():
        assert tier.name in result.stdout
    for word in ("threads:", "memory:", "torch", "transformers", "kt_kernel", str(Path(kt_kernel.__file__).parent)):
        assert word in result.stdout


def test_json_holds_the_same_for_scripts(kt: Kt) -> None:
    found = json.loads(kt("doctor", "--json").stdout)
    assert {row["name"] for row in found["cpu"]["tiers"]} == {tier.name for tier in _ext.tiers()}
    assert found["cpu"]["threads"]["default"] >= 1
    assert found["memory"]["total"] >= found["memory"]["available"] > 0
    assert {c["name"]: c["version"] for c in found["components"]}["kt_kernel"] == kt_kernel.__version__
    assert set(found["cpu"]["chosen"]) == {"INT8", "BF16"}


def test_a_capped_tier_says_which_variable_caps_it(kt: Kt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUINFER_ENABLE_AVX2", "OFF")
    found = json.loads(kt("doctor", "--json").stdout)
    assert found["cpu"]["chosen"] == {"INT8": "generic", "BF16": "generic"}
    assert "CPUINFER_ENABLE_AVX2=OFF" in {row["name"]: row["why_not"] for row in found["cpu"]["tiers"]}["avx2"]
    assert "CPUINFER_ENABLE_AVX2=OFF" in kt("doctor").stdout


def test_threads_name_the_variable_they_come_from(kt: Kt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_NUM_THREADS", "3")
    assert "threads: 3, from the KT_NUM_THREADS" in kt("doctor").stdout


def test_a_variable_that_cannot_be_read_is_a_problem(kt: Kt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_NUM_THREADS", "many")
    result = kt("doctor")
    assert result.exit_code == 1
    assert "KT_NUM_THREADS" in result.stderr
    assert "memory:" in result.stdout


def test_a_kernel_that_cannot_be_imported_is_a_problem_and_not_a_crash(kt: Kt, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: diagnosis.Diagnosis) -> None:
        raise ImportError("kernel 0.0.9 at /old does not belong to kt_kernel 0.1.0 at /new")

    monkeypatch.setattr(diagnosis, "_ask_kernel", refuse)
    result = kt("doctor")
    assert result.exit_code == 1
    assert "/old does not belong to kt_kernel 0.1.0 at /new" in result.stderr


def test_an_old_extension_on_the_path_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stale = tmp_path / "kt_kernel" / "_ext.cpython-311-x86_64-linux-gnu.so"
    stale.parent.mkdir()
    stale.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    problems = diagnosis.diagnose().problems
    assert any(str(stale) in problem and _ext.__file__ in problem for problem in problems)


def test_sources_newer_than_the_extension_are_named(tmp_path: Path) -> None:
    extension = tmp_path / "site" / "_ext.so"
    source = tmp_path / "kernel" / "src" / "moe" / "moe.cpp"
    for path in (extension, source):
        path.parent.mkdir(parents=True)
        path.touch()
    package = tmp_path / "kernel" / "kt_kernel"
    (tmp_path / "kernel" / "CMakeLists.txt").touch()
    os.utime(extension, (1000, 1000))
    assert any("older than the sources" in p for p in diagnosis._skew(kt_kernel.__version__, package, extension))
    os.utime(source, (500, 500))
    assert not any("older than the sources" in p for p in diagnosis._skew(kt_kernel.__version__, package, extension))


def test_a_version_that_differs_between_python_and_kernel_is_named(tmp_path: Path) -> None:
    extension = tmp_path / "_ext.so"
    extension.touch()
    assert any("0.0.1" in problem for problem in diagnosis._skew("0.0.1", tmp_path, extension))


def test_explain_says_that_an_amx_name_runs_here_and_on_what(kt: Kt) -> None:
    result = kt("doctor", "--explain", "AMXINT8")
    assert result.exit_code == 0
    chosen = kt_kernel.cpu_info().chosen["INT8"]
    assert f"runs here: yes, as INT8 on {chosen}" in result.stdout
    assert result.stderr == ""


def test_explain_gives_json_too(kt: Kt) -> None:
    answer = json.loads(kt("doctor", "--explain", "amxbf16", "--json").stdout)
    assert answer["backend"] == "AMXBF16"
    assert answer["format"] == "BF16"


@pytest.mark.parametrize(("name", "text"), [("AMXIMT8", "AMXINT8"), ("RAWINT4", "not in this version")])
def test_explain_refuses_what_does_not_run(kt: Kt, name: str, text: str) -> None:
    result = kt("doctor", "--explain", name)
    assert result.exit_code == 2
    assert text in result.stderr
