"""The pre-flight's look at Python, the environment and the disk."""

from __future__ import annotations

from tests.install.machine import Machine


def test_an_old_python3_is_passed_over_for_a_newer_one(machine: Machine) -> None:
    machine.python("python3", "3.9")
    newer = machine.python("python3.12", "3.12")
    assert machine.install().line("python") == f"{newer} (3.12)"


def test_an_old_python_alone_is_refused_with_its_version_and_path(machine: Machine) -> None:
    old = machine.python("python3", "3.9")
    outcome = machine.install()
    assert outcome.code == 1
    assert f"{old} is 3.9" in outcome.err


def test_the_python_asked_for_is_used(machine: Machine) -> None:
    asked = machine.python("my-python", "3.13")
    assert machine.install(PYTHON="my-python").line("python") == f"{asked} (3.13)"


def test_a_python_asked_for_that_is_too_old_is_not_replaced_by_another(machine: Machine) -> None:
    machine.python("python3.8", "3.8")
    outcome = machine.install(PYTHON="python3.8")
    assert outcome.code == 1
    assert "PYTHON=python3.8 is Python 3.8; 3.11 or newer is needed" in outcome.err


def test_missing_headers_name_the_package(machine: Machine) -> None:
    machine.python("python3", "3.12", headers=False)
    outcome = machine.install()
    assert outcome.code == 1
    assert "Python.h is not in /usr/include/python3.12" in outcome.err
    assert "apt install python3.12-dev" in outcome.err


def test_a_python_that_cannot_make_environments_names_the_package(machine: Machine) -> None:
    machine.python("python3", "3.11", venv=False)
    outcome = machine.install()
    assert outcome.code == 1
    assert "cannot make virtual environments" in outcome.err
    assert "apt install python3.11-venv" in outcome.err


def test_all_misses_are_listed_at_once(machine: Machine) -> None:
    machine.python("python3", "3.11", venv=False, headers=False)
    machine.command("df", "printf 'Filesystem\\n/dev/x 10 5 1024 1%% /\\n'")
    outcome = machine.install(CXX="/bin/false", CPUINFER_ENABLE_AMX="perhaps")
    assert outcome.code == 1
    misses = [line for line in outcome.err.splitlines() if line.startswith("  - ")]
    assert len(misses) == 5
    assert "apt install g++ python3.11-dev python3.11-venv" in outcome.err


def test_the_active_environment_is_used(machine: Machine) -> None:
    active = str(machine.folder / "active")
    path = machine.python("python", "3.12", prefix=active)
    outcome = machine.install(VIRTUAL_ENV=active)
    assert outcome.line("python") == f"{path} (3.12)"
    assert outcome.line("environment") == active


def test_an_active_environment_with_an_old_python_is_refused(machine: Machine) -> None:
    active = str(machine.folder / "active")
    machine.python("python", "3.10", prefix=active)
    outcome = machine.install(VIRTUAL_ENV=active)
    assert outcome.code == 1
    assert f"the active environment {active} is Python 3.10" in outcome.err


def test_the_active_conda_environment_is_used_but_not_its_base(machine: Machine) -> None:
    conda = str(machine.folder / "conda")
    machine.python("python", "3.12", prefix=conda)
    assert machine.install(CONDA_PREFIX=conda, CONDA_DEFAULT_ENV="work").line("environment") == conda
    base = machine.install(CONDA_PREFIX=conda, CONDA_DEFAULT_ENV="base")
    assert base.line("environment").startswith(str(machine.sources / ".venv"))


def test_a_full_disk_is_named_with_both_numbers(machine: Machine) -> None:
    machine.command("df", "printf 'Filesystem\\n/dev/x 10 5 512000 1%% /\\n'")
    outcome = machine.install()
    assert outcome.code == 1
    assert "500 MB of free disk; the installation needs 4096 MB" in outcome.err


def test_a_torch_that_is_new_enough_is_kept(machine: Machine) -> None:
    active = machine.folder / "active"
    path = machine.python("python", "3.12", prefix=str(active))
    path.write_text(path.read_text() + '[[ "$*" == "-I - 2.6" ]] && echo 2.9.1\nexit 0\n')
    assert machine.install(VIRTUAL_ENV=str(active)).line("torch") == "keep 2.9.1"


def test_torch_is_installed_first_and_its_version_can_be_chosen(machine: Machine) -> None:
    assert machine.install().line("torch") == "pip install torch==2.13.0"
    chosen = machine.install(KT_TORCH_SPEC="torch==2.6.0 --no-cache-dir")
    assert chosen.line("torch") == "pip install torch==2.6.0 --no-cache-dir"
