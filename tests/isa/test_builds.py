"""Which tiers a build of the kernel holds: those its compiler can emit and its switches allow, and no others."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path

import pytest

from tests.isa.conftest import ROOT, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # it compiles
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="tiers beyond generic are x86-64's"),
]

# An older compiler: refuses the flags named in the file beside it. It also optimises nothing, to be quick about it.
COMPILER = """#!/bin/bash
here="$(dirname "$0")"
words=()
for word in "$@"; do
  if grep -qx -e "$word" "$here/refused"; then
    echo "g++: error: unrecognized command-line option '$word'" >&2
    exit 1
  fi
  [[ "$word" == -O? ]] || words+=("$word")
done
exec g++ "${words[@]}"
"""

# What kt_tests --tiers says, without building the tests.
PROGRAM = """
#include <cstdio>
#include "tiers/registry.hpp"
int main() {
  for (const kt::Tier& tier : kt::all_tiers()) {
    if (tier.table != nullptr) std::puts(std::string(tier.name).c_str());
  }
}
"""


class Builder:
    """Configures and builds the kernel's library, again and again in one folder."""

    def __init__(self, cmake: str, folder: Path) -> None:
        self.cmake, self.folder = cmake, folder
        self.compiler = folder / "g++"
        self.compiler.write_text(COMPILER)
        self.compiler.chmod(0o755)
        self.refuse()
        (folder / "tiers.cpp").write_text(PROGRAM)

    def refuse(self, *flags: str) -> None:
        (self.folder / "refused").write_text("".join(f"{flag}\n" for flag in flags))

    def configure(self, **switches: str) -> str:
        """What cmake says; switches are AMX, AVX512, AVX2 = ON or OFF."""
        command = [self.cmake, "-S", str(ROOT / "kernel"), "-B", str(self.folder / "build"), "-G", "Ninja"]
        command += [f"-DCMAKE_CXX_COMPILER={self.compiler}", "-DKT_BUILD_PYTHON=OFF"]
        command += ["-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
        command += [f"-DKTRANSFORMERS_CPU_USE_{name}={value}" for name, value in switches.items()]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout

    def planned(self) -> set[str]:
        """The tiers whose sources the build compiles."""
        commands = json.loads((self.folder / "build/compile_commands.json").read_text())
        folders = [Path(command["file"]).parent for command in commands]
        return {folder.name for folder in folders if folder.parent.name == "tiers"}

    def tiers(self) -> list[str]:
        """The tiers that the registry of the built library has tables of."""
        build, program = self.folder / "build", self.folder / "tiers"
        run(self.cmake, "--build", build, "--target", "kt_core")
        sources = (self.folder / "tiers.cpp", build / "libkt_core.a")
        run("g++", "-std=c++20", "-I", ROOT / "kernel/src", *sources, "-pthread", "-o", program)
        return subprocess.run([program], capture_output=True, text=True, check=True, timeout=60).stdout.split()

    def members(self) -> set[str]:
        """The objects in the library."""
        command = ["ar", "t", str(self.folder / "build/libkt_core.a")]
        return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_a_compiler_without_amx_and_bf16_builds_the_other_tiers_and_says_so(cmake: str, tmp_path: Path) -> None:
    builder = Builder(cmake, tmp_path)
    builder.refuse("-mamx-tile", "-mamx-int8", "-mamx-bf16", "-mavx512bf16")
    said = [line for line in builder.configure().splitlines() if "left out" in line]
    assert [line.split()[2] for line in said] == ["avx512_bf16:", "amx:"]
    assert all("the compiler cannot emit" in line for line in said)
    assert "-mamx-tile" in said[-1]
    assert builder.planned() == {"generic", "avx2", "avx_vnni", "avx512", "avx512_vnni"}


def test_switches_over_each_other_in_one_folder_leave_the_tiers_of_the_last(cmake: str, tmp_path: Path) -> None:
    builder = Builder(cmake, tmp_path)
    builder.refuse("-mavxvnni")  # spares the time of compiling it
    builder.configure(AVX2="ON", AVX512="OFF", AMX="OFF")
    assert builder.tiers() == ["generic", "avx2"]
    builder.configure(AVX2="OFF")
    assert builder.tiers() == ["generic"]
    assert "avx2.cpp.o" not in builder.members()
    builder.configure(AVX2="ON")
    assert builder.tiers() == ["generic", "avx2"]


def test_a_compiler_that_knows_the_flag_and_not_the_intrinsics_leaves_the_tier_out(cmake: str, tmp_path: Path) -> None:
    builder = Builder(cmake, tmp_path)
    # As with an assembler or headers older than the compiler: what the flag would bring is not there.
    builder.compiler.write_text(
        COMPILER.replace('[[ "$word" == -O? ]]', '[[ "$word" == -O? || "$word" == -mavx512bf16 ]]')
    )
    said = [line for line in builder.configure(AVX2="OFF", AMX="OFF").splitlines() if "left out" in line]
    assert [line.split()[2] for line in said] == ["avx512_bf16:"]
    assert builder.planned() == {"generic", "avx512", "avx512_vnni"}
