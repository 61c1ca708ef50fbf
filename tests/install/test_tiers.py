"""The table of tiers, and the switches that reach CMake."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kt_kernel import _ext
from tests.install.machine import ROOT, X86_FLAGS, Machine, make_machine

_NO_AMX = "no, lacks amx_tile amx_int8 amx_bf16"
_NO_AVX512 = "no, lacks avx512f avx512bw avx512dq avx512vl"


def _switches(machine: Machine, **environ: str) -> dict[str, str]:
    line = machine.install(**environ).line("kernel")
    return dict(word.removeprefix("-DKTRANSFORMERS_CPU_USE_").split("=") for word in line.split()[1:])


def _cpu_flags(machine: Machine, cpuinfo: Path) -> list[str]:
    script = f'set -euo pipefail; source "{ROOT}/tools/install/machine.sh"; cpu_flags "{cpuinfo}"'
    command = [str(machine.commands / "bash"), "-c", script]
    run = subprocess.run(
        command, env={"PATH": str(machine.commands)}, capture_output=True, text=True, timeout=20, check=True
    )
    return run.stdout.split()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("amx", {"avx2": "yes", "avx512": "yes", "avx512_bf16": "yes", "amx": "yes"}),
        ("zen4", {"avx512_bf16": "yes", "avx_vnni": "no, lacks avx_vnni", "amx": _NO_AMX}),
        ("avx2", {"avx2": "yes", "avx512": _NO_AVX512, "avx512_vnni": _NO_AVX512, "amx": _NO_AVX512}),
        ("avx", {"avx2": "no, lacks avx2 fma", "amx": "no, lacks avx2 fma"}),
    ],
)
def test_the_table_tells_what_this_cpu_runs(tmp_path: Path, flags: str, expected: dict[str, str]) -> None:
    outcome = make_machine(tmp_path / "machine", flags=X86_FLAGS[flags]).install()
    assert outcome.code == 0
    for tier, answer in expected.items():
        assert outcome.row(tier).endswith(answer)


def test_the_table_lists_the_tiers_of_the_kernel(machine: Machine) -> None:
    table = machine.install().out.split("\n\n")[0].splitlines()[1:]
    listed = [line.split()[0] for line in table if line and not line.startswith("tier ")]
    assert listed == [tier.name for tier in _ext.tiers()]


def test_a_cpu_with_avx_only_is_told_that_the_generic_tier_runs(tmp_path: Path) -> None:
    outcome = make_machine(tmp_path / "machine", flags=X86_FLAGS["avx"]).install()
    assert outcome.code == 0
    assert "This CPU lacks avx2 fma: the generic tier will run, correct but slow." in outcome.out


def test_an_arm_server_is_told_at_once_what_it_gets(machine: Machine) -> None:
    machine.cpu("Architecture: aarch64\nFeatures: fp asimd asimddp sve\n", machine="aarch64")
    outcome = machine.install()
    assert outcome.code == 0
    assert "ARM machine (aarch64): the generic tier is built" in outcome.out
    assert outcome.row("avx2").endswith("no, not an x86 processor")
    assert "KTRANSFORMERS_CPU_USE_AVX2=OFF" in outcome.line("kernel")


@pytest.mark.parametrize("odd", ["", "lscpu: cannot open something\n", "Flags:\n", "NUMA node0 CPU(s): 0\nflags\n"])
@pytest.mark.parametrize("key", ["flags\t\t", "Features\t"])
def test_odd_output_of_lscpu_falls_back_to_cpuinfo(machine: Machine, odd: str, key: str) -> None:
    machine.cpu(odd)
    cpuinfo = machine.folder / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{key}: one two\n\nprocessor\t: 1\n{key}: three\n")
    assert _cpu_flags(machine, cpuinfo) == ["one", "two"]


def test_flags_that_nobody_tells_are_unknown(machine: Machine) -> None:
    machine.command("lscpu", "exit 1")
    assert _cpu_flags(machine, machine.folder / "absent") == []


def test_flags_with_dashes_and_capitals_are_read(tmp_path: Path) -> None:
    flags = X86_FLAGS["amx"].replace("_", "-").upper()
    assert make_machine(tmp_path / "machine", flags=flags).install().row("amx").endswith("yes")


def test_whatever_the_cpu_every_tier_the_compiler_emits_is_built(machine: Machine) -> None:
    assert _switches(machine) == {"AMX": "ON", "AVX512": "ON", "AVX2": "ON"}


def test_a_compiler_that_does_not_know_amx_builds_without_it(machine: Machine) -> None:
    machine.compiler("g++", "11.4.0", refuses="-mamx")
    assert machine.install().row("amx").split()[1] == "no"
    assert _switches(machine) == {"AMX": "OFF", "AVX512": "ON", "AVX2": "ON"}


@pytest.mark.parametrize("family", ["AMX", "AVX512", "AVX2"])
@pytest.mark.parametrize(("value", "switch"), [("OFF", "OFF"), ("ON", "ON"), ("off", "OFF"), ("1", "ON"), ("", "ON")])
def test_the_variable_of_a_family_overrides_its_switch(machine: Machine, family: str, value: str, switch: str) -> None:
    expected = {"AMX": "ON", "AVX512": "ON", "AVX2": "ON", family: switch}
    assert _switches(machine, **{f"CPUINFER_ENABLE_{family}": value}) == expected


def test_another_value_of_the_variable_is_refused(machine: Machine) -> None:
    outcome = machine.install(CPUINFER_ENABLE_AVX512="maybe")
    assert outcome.code == 1
    assert 'CPUINFER_ENABLE_AVX512 is "maybe": it takes ON or OFF (also 1/0, true/false, yes/no).' in outcome.err


def test_on_for_a_tier_the_compiler_cannot_emit_is_said(machine: Machine) -> None:
    machine.compiler("g++", "11.4.0", refuses="-mamx")
    outcome = machine.install(CPUINFER_ENABLE_AMX="ON")
    assert "CPUINFER_ENABLE_AMX=ON, but the compiler cannot emit it" in outcome.out
