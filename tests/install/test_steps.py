"""What install.sh does after the pre-flight: steps and their log, the stamp, the checks of the suite."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.install.machine import ROOT


def _bash(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs `script` after the parts of install.sh it needs, with its variables for `folder`."""
    parts = " ".join(f'"{ROOT}/tools/install/{part}.sh"' for part in ("say", "build", "suite"))
    setup = f"""
      set -euo pipefail
      for part in {parts}; do source "$part"; done
      KT_ROOT="{folder}" LOG="{folder}/install.log" CXX_TEXT="g++ 12" PYTHON_VERSION=3.11 EXTRAS=""
      CMAKE_SWITCHES=(-DKTRANSFORMERS_CPU_USE_AMX=ON)
      : >"$LOG"
    """
    return subprocess.run(["bash", "-c", setup + script], capture_output=True, text=True, timeout=30, check=False)


def _make_sources(folder: Path) -> Path:
    for name in ("kernel/src", "ktransformers", "optimize_rules"):
        (folder / name).mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "kernel/src/moe.cpp", "optimize_rules/moe.yaml"):
        (folder / name).write_text(name)
    return folder


def _state(folder: Path, before: str = "") -> str:
    run = _bash(f"{before}\nsource_state", folder)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_a_step_that_succeeds_is_one_line(tmp_path: Path) -> None:
    run = _bash("step 'Building' bash -c 'seq 1000'", tmp_path)
    assert run.returncode == 0
    assert run.stdout.startswith("Building … done in")
    assert len(run.stdout.splitlines()) == 1
    assert "1000" in (tmp_path / "install.log").read_text()


def test_a_step_that_fails_shows_its_first_error_its_end_and_where_the_log_is(tmp_path: Path) -> None:
    build = "echo moe.cpp:7: error: no such thing; seq 1000; echo the end; exit 3"
    run = _bash(f"step 'Building' bash -c '{build}'\necho not reached", tmp_path)
    assert run.returncode == 1
    assert "moe.cpp:7: error: no such thing" in run.stderr
    assert "the end" in run.stderr
    assert f"Building failed (exit status 3). The whole log: {tmp_path}/install.log" in run.stderr
    assert "| 500" not in run.stderr
    assert "not reached" not in run.stdout


def test_an_error_of_an_earlier_step_is_not_shown_again(tmp_path: Path) -> None:
    run = _bash("step 'One' bash -c 'echo error: old'; step 'Two' bash -c 'echo error: new; exit 1'", tmp_path)
    first_errors = run.stderr.split("The last lines:")[0]
    assert "error: new" in first_errors
    assert "error: old" not in first_errors


def test_the_state_of_the_sources_changes_with_what_the_build_reads_and_nothing_else(tmp_path: Path) -> None:
    sources = _make_sources(tmp_path)
    state = _state(sources)
    cache = sources / "ktransformers" / "__pycache__"
    cache.mkdir()
    (cache / "model.pyc").write_text("bytecode")
    (sources / "build").mkdir()
    assert _state(sources) == state
    assert _state(sources, "CMAKE_SWITCHES=(-DKTRANSFORMERS_CPU_USE_AMX=OFF)") != state
    assert _state(sources, "PYTHON_VERSION=3.12") != state
    assert _state(sources, 'CXX_TEXT="clang++ 17"') != state
    (sources / "optimize_rules" / "moe.yaml").write_text("changed")
    assert _state(sources) != state


def test_an_installation_is_repeated_only_where_the_stamp_or_the_package_is_missing(tmp_path: Path) -> None:
    stamp = tmp_path / "stamp"
    check = f'PYTHON_PATH={{python}}; is_installed "{stamp}" state && echo installed || echo not'
    true, false = shutil.which("true"), shutil.which("false")
    assert _bash(check.format(python=true), tmp_path).stdout.strip() == "not"
    stamp.write_text("state\n")
    assert _bash(check.format(python=true), tmp_path).stdout.strip() == "installed"
    assert _bash(check.format(python=false), tmp_path).stdout.strip() == "not"
    stamp.write_text("state[test]\n")
    assert _bash(check.format(python=true), tmp_path).stdout.strip() == "installed"
    stamp.write_text("another state\n")
    assert _bash(check.format(python=true), tmp_path).stdout.strip() == "not"


def test_a_check_that_fails_is_noted_and_the_next_one_still_runs(tmp_path: Path) -> None:
    run = _bash("check One false; check Two true; echo failed: ${FAILED_CHECKS[*]}", tmp_path)
    assert "One: FAILED" in run.stdout
    assert "Two: fine" in run.stdout
    assert "failed: One" in run.stdout


def _sanitizer(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """What the suite makes of a sanitizer run that does as `script` does."""
    tool = folder / "tools" / "sanitize.sh"
    tool.parent.mkdir()
    (folder / "build").mkdir()
    tool.write_text(f"#!/bin/bash\n{script}\n")
    tool.chmod(0o755)
    return _bash(
        """
        VENV=/nowhere CXX_COMMAND=(g++) EXECUTED=records
        executed() { echo "executed:" "$@"; }
        check Sanitizer sanitizer thread
        """,
        folder,
    )


def test_a_sanitizer_the_compiler_lacks_is_told_in_one_line_and_is_no_failure(tmp_path: Path) -> None:
    run = _sanitizer(tmp_path, "echo 'not run: no sanitizer thread, g++ cannot link: no -ltsan'; exit 77")
    told, kept, verdict = run.stdout.splitlines()[2:]
    assert told == "not run: no sanitizer thread, g++ cannot link: no -ltsan"
    assert kept == "executed: not-run records sanitizer thread no sanitizer thread, g++ cannot link: no -ltsan"
    assert verdict.startswith("Sanitizer: fine")


def test_what_a_sanitizer_finds_is_shown_and_fails(tmp_path: Path) -> None:
    run = _sanitizer(tmp_path, "echo 'ok    a test'; echo 'WARNING: data race'; exit 66")
    assert "executed: record records sanitizer thread 66" in run.stdout
    assert "WARNING: data race" in run.stdout
    assert "ok    a test" not in run.stdout
    assert "Sanitizer: FAILED" in run.stdout


@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_the_sanitizer_script_tries_its_compiler_first(tmp_path: Path, kind: str) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/bash\necho 'ld: cannot find the library' >&2\nexit 1\n")
    compiler.chmod(0o755)
    script = [str(ROOT / "tools" / "sanitize.sh"), "--brief", kind]
    environment = {"CXX": str(compiler), "PATH": "/usr/bin:/bin"}
    run = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert run.returncode == 77
    assert run.stdout == f"not run: no sanitizer {kind}, {compiler} cannot link: ld: cannot find the library\n"


def test_pip_is_given_the_cmake_switches_in_words_that_old_versions_know(tmp_path: Path) -> None:
    run = _bash("CXX_COMMAND=(g++) PYTHON_PATH=echo\ninstall_package", tmp_path)
    assert run.returncode == 0, run.stderr
    arguments = run.stdout.split()
    assert "--config-settings=cmake.define.KTRANSFORMERS_CPU_USE_AMX=ON" in arguments
    assert "-C" not in arguments  # pip 23.1 and newer
    assert arguments[-1] == str(tmp_path)
