"""The pre-flight's look at the C++ compiler."""

from __future__ import annotations

import pytest

from tests.install.machine import Machine


def test_an_old_compiler_is_refused_with_its_version_and_path(bare_machine: Machine) -> None:
    path = bare_machine.compiler("g++", "4.8.5")
    bare_machine.python("python3", "3.11")
    outcome = bare_machine.install()
    assert outcome.code == 1
    assert f"{path} is gcc 4.8.5, too old" in outcome.err
    assert "g++ 11" in outcome.err


def test_an_old_compiler_first_on_the_path_is_passed_over_for_a_newer_one_and_named(machine: Machine) -> None:
    old = machine.compiler("g++", "4.8.5")
    new = machine.compiler("g++-13", "13.1.0")
    outcome = machine.install()
    assert outcome.code == 0
    assert f"Passed over: {old} is gcc 4.8.5" in outcome.out
    assert outcome.line("compiler") == f"{new} (gcc 13.1.0)"


def test_a_new_c_compiler_beside_an_old_cxx_compiler_is_refused(machine: Machine) -> None:
    machine.compiler("gcc", "13.1.0")
    machine.compiler("g++", "11.4.0")
    outcome = machine.install(CC="gcc", CXX="g++")
    assert outcome.code == 1
    assert "CC=gcc is gcc 13.1.0 and CXX=g++ is gcc 11.4.0" in outcome.err


def test_gcc_beside_clang_is_refused(machine: Machine) -> None:
    machine.compiler("gcc", "14.1.0")
    machine.compiler("clang++", "14.0.6", family="clang")
    outcome = machine.install(CC="gcc", CXX="clang++")
    assert outcome.code == 1
    assert "CXX=clang++ is clang 14.0.6" in outcome.err


def test_a_pair_of_one_version_is_taken(machine: Machine) -> None:
    machine.compiler("gcc-13", "13.1.0")
    path = machine.compiler("g++-13", "13.2.0")
    assert machine.install(CC="gcc-13", CXX="g++-13").line("compiler").startswith(str(path))


def test_a_cxx_that_is_no_compiler_is_named(machine: Machine) -> None:
    outcome = machine.install(CC="gcc", CXX="/bin/false")
    assert outcome.code == 1
    assert "CXX=/bin/false: /bin/false does not answer like g++ or clang++" in outcome.err


def test_a_cxx_that_is_not_there_is_named(machine: Machine) -> None:
    outcome = machine.install(CXX="g++-99")
    assert outcome.code == 1
    assert "CXX=g++-99: there is no such command" in outcome.err


def test_a_compiler_without_a_standard_library_is_named(bare_machine: Machine) -> None:
    path = bare_machine.compiler("clang++", "17.0.1", family="clang", refuses="-std=c++20")
    bare_machine.python("python3", "3.11")
    outcome = bare_machine.install()
    assert outcome.code == 1
    assert f"{path} is clang 17.0.1, but cannot compile and link a one-line C++20 program" in outcome.err


def test_cc_alone_chooses_its_cxx_partner(machine: Machine) -> None:
    partner = machine.compiler("clang++-17", "17.0.1", family="clang")
    outcome = machine.install(CC="clang-17")
    assert outcome.line("compiler") == f"{partner} (clang 17.0.1)"


def test_a_compiler_behind_a_launcher_is_taken(machine: Machine) -> None:
    launcher = machine.command("ccache", 'exec "$@"')
    assert machine.install(CXX="ccache g++").line("compiler") == f"{launcher} (gcc 12.2.0)"


@pytest.mark.parametrize(
    ("os_release", "command"),
    [
        ("ID=debian", "apt install g++ python3.11 python3.11-venv python3.11-dev"),
        ('ID=linuxmint\nID_LIKE="ubuntu debian"', "apt install g++ python3.11 python3.11-venv python3.11-dev"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"', "dnf install gcc-c++ python3.11 python3.11-pip python3.11-devel"),
        ("ID=arch", "pacman -S gcc python"),
        ("ID=alpine", "apk add g++ python3-dev"),
        ('ID="opensuse-leap"', "zypper install gcc-c++ python311 python311-pip python311-devel"),
    ],
)
def test_what_is_missing_is_named_with_the_packages_of_the_distribution(
    bare_machine: Machine, os_release: str, command: str
) -> None:
    bare_machine.distribution(os_release + "\n")
    outcome = bare_machine.install()
    assert outcome.code == 1
    assert "There is no C++ compiler" in outcome.err
    assert "There is no Python 3.11 or newer" in outcome.err
    assert [line.strip() for line in outcome.err.splitlines() if "install" in line or "-S" in line or " add " in line][
        -1
    ] == command


def test_an_unknown_distribution_is_told_the_packages_of_all(bare_machine: Machine) -> None:
    bare_machine.distribution("ID=homemade\n")
    error = bare_machine.install().err
    for verb in ("apt install", "dnf install", "pacman -S", "apk add", "zypper install"):
        assert verb in error
