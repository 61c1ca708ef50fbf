"""Builds the static kernel tests, as shipped but for the linking, and the small programs of guest/."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from tools.emulate.commands import output_of, say
from tools.emulate.emulator import GUEST_SOURCES
from tools.emulate.errors import EmulationFailed, NotAvailable

REPOSITORY = Path(__file__).resolve().parents[2]
KERNEL = REPOSITORY / "kernel"
OPTIONS = ("-DKT_BUILD_PYTHON=OFF", "-DKT_BUILD_TESTS=ON")


def _tool(name: str) -> str:
    """A tool beside this Python (where `pip install` puts it) or on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise NotAvailable(f"no {name} on this machine to build the kernel tests with")
    return found


def _built(*command: str | Path) -> None:
    try:
        output_of(command)
    except NotAvailable as error:
        # The tools are there: a build that fails is the kernel's fault, and must not pass for "not run".
        raise EmulationFailed(f"the kernel tests do not build: {error}") from error


def build_kernel_tests(folder: Path) -> Path:
    """kernel/tests as one static program, for every tier the compiler knows; what `folder` holds is not built again."""
    cmake, ninja = _tool("cmake"), _tool("ninja")
    say(f"building the kernel tests in {folder}")
    generator = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}")
    _built(cmake, "-S", KERNEL, "-B", folder, *generator, "-DCMAKE_BUILD_TYPE=Release", *OPTIONS)
    _built(ninja, "-C", folder, f"-j{os.cpu_count() or 1}", "kt_tests_static")
    return folder / "tests/kt_tests_static"


def build_program(name: str, folder: Path) -> Path:
    """guest/<name>.cpp, static, with the library that build_kernel_tests left in `folder` and the tests' helpers."""
    program = folder / name
    sources = (GUEST_SOURCES / f"{name}.cpp", KERNEL / "tests/layers.cpp", folder / "libkt_core.a")
    include = ("-I", KERNEL / "src", "-I", KERNEL / "tests")
    _built("g++", "-std=c++20", "-O2", "-static", *include, *sources, "-pthread", "-o", program)
    return program


def build_selftest(folder: Path) -> Path:
    """The emulator's own test; it uses nothing of the kernel."""
    program = folder / "selftest"
    sources = sorted(GUEST_SOURCES.glob("selftest*.cpp"))
    _built("g++", "-std=c++20", "-O2", "-static", *sources, "-pthread", "-o", program)
    return program
