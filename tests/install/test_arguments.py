"""install.sh's own command line, and the copies of the sources it is started from."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.install.machine import ROOT, Machine, make_machine


def _unpack_archive(folder: Path) -> Path:
    """The files of a release archive: no .git, no environment, no build."""
    folder.mkdir()
    for name in ("install.sh", "tools", "pyproject.toml", "kernel", "optimize_rules", "README.md", "LICENSE"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, folder / name)
    return folder


@pytest.mark.parametrize(("word", "nearest"), [("demoo", "demo"), ("tset", "test"), ("--dryrun", "--dry-run")])
def test_an_unknown_word_names_the_nearest(machine: Machine, word: str, nearest: str) -> None:
    outcome = machine.install(word)
    assert outcome.code == 2
    assert f'install.sh does not know "{word}", did you mean "{nearest}"?' in outcome.err


def test_a_word_near_nothing_points_to_the_help(machine: Machine) -> None:
    outcome = machine.install("uninstall-everything")
    assert outcome.code == 2
    assert "did you mean" not in outcome.err
    assert "--help" in outcome.err


def test_help_explains_each_command_and_variable(machine: Machine) -> None:
    outcome = machine.install("--help")
    assert outcome.code == 0
    for word in ("demo", "test", "--dry-run", "PYTHON", "CXX", "CPUINFER_ENABLE_AMX", "KT_TORCH_SPEC", ".venv"):
        assert word in outcome.out


def test_two_commands_at_a_time_are_refused(machine: Machine) -> None:
    outcome = machine.install("demo", "test")
    assert outcome.code == 2
    assert "got demo and test" in outcome.err


def test_a_release_archive_is_enough_and_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    machine = make_machine(tmp_path / "machine")
    machine.other_sources = _unpack_archive(tmp_path / "ktransformers-0.1.0")
    before = sorted(machine.sources.rglob("*"))
    outcome = machine.install("test")
    assert outcome.code == 0, outcome.err
    assert "Dry run: nothing was changed." in outcome.out
    assert outcome.line("package") == "pip install .[test]"
    assert sorted(machine.sources.rglob("*")) == before


def test_a_folder_with_a_blank_in_its_name_works(tmp_path: Path) -> None:
    machine = make_machine(tmp_path / "machine")
    machine.other_sources = _unpack_archive(tmp_path / "my sources")
    outcome = machine.install()
    assert outcome.code == 0, outcome.err
    assert str(machine.sources / ".venv") in outcome.line("environment")


def test_an_incomplete_copy_is_named(tmp_path: Path) -> None:
    machine = make_machine(tmp_path / "machine")
    machine.other_sources = tmp_path
    shutil.copy2(ROOT / "install.sh", tmp_path)
    outcome = machine.install()
    assert outcome.code == 1
    assert "this copy of the sources is incomplete" in outcome.err


def test_the_variable_asks_for_a_dry_run_too(machine: Machine) -> None:
    bash = str(machine.commands / "bash")
    environ = {"PATH": str(machine.commands), **machine.environ}
    command = [bash, str(machine.sources / "install.sh")]
    asked = subprocess.run(
        command, env={**environ, "KT_DRY_RUN": "1"}, capture_output=True, text=True, timeout=60, check=True
    )
    assert "Dry run" in asked.stdout
    wrong = subprocess.run(
        command, env={**environ, "KT_DRY_RUN": "soon"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert wrong.returncode == 2
    assert 'KT_DRY_RUN is "soon"' in wrong.stderr


def test_each_script_parses() -> None:
    for script in (ROOT / "install.sh", ROOT / ".ci" / "run", *(ROOT / "tools" / "install").glob("*.sh")):
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)


@pytest.mark.parametrize("spelt", ["1", "ON", "yes", "True"])
def test_a_dry_run_is_asked_for_in_any_spelling_of_yes(machine: Machine, spelt: str) -> None:
    assert "Dry run" in machine.install(KT_DRY_RUN=spelt).out


def test_a_blank_pip_specification_is_refused(machine: Machine) -> None:
    outcome = machine.install(KT_TORCH_SPEC="  ")
    assert outcome.code == 2
    assert "KT_TORCH_SPEC is blank: it takes what pip install takes, such as torch==" in outcome.err


def test_an_odd_switch_names_every_spelling(machine: Machine) -> None:
    outcome = machine.install(CPUINFER_ENABLE_AMX="maybe")
    assert outcome.code == 1
    assert 'CPUINFER_ENABLE_AMX is "maybe": it takes ON or OFF (also 1/0, true/false, yes/no).' in outcome.err
