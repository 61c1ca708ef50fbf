"""Choosing a tier, with the tiers and flags of machines that are not here."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kt_kernel import AMXMoEWrapper, AVX2MoEWrapper, KernelError, MoEWrapper, UnsupportedCpuError, _ext, parse_backend
from kt_kernel.tier import choose_tier, family_of
from tests.kernel.layers import BEST, make_layer

# name, features, state: every tier there will be, as the C++ registry declares them.
LADDER: list[tuple[str, set[str], str, list[str]]] = [
    ("generic", set(), "", ["INT8", "BF16"]),
    ("avx2", {"avx2", "fma", "f16c"}, "os_avx", ["INT8", "BF16"]),
    ("avx_vnni", {"avx2", "fma", "f16c", "avx_vnni"}, "os_avx", ["INT8"]),
    ("avx512", {"avx512f", "avx512bw", "avx512dq", "avx512vl"}, "os_avx512", ["INT8", "BF16"]),
    ("avx512_vnni", {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}, "os_avx512", ["INT8"]),
    ("avx512_bf16", {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}, "os_avx512", ["BF16"]),
    ("amx", {"avx512f", "amx_tile", "amx_int8", "amx_bf16"}, "os_amx", ["INT8", "BF16"]),
]
HASWELL = {"avx", "avx2", "fma", "f16c", "os_avx"}
SKYLAKE_X = HASWELL | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "os_avx512"}
CASCADE_LAKE = SKYLAKE_X | {"avx512_vnni"}
SAPPHIRE_RAPIDS = CASCADE_LAKE | {"avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16", "os_amx"}


class _Tier:
    def __init__(
        self, name: str, needs: set[str], state: str, formats: list[str], flags: set[str], compiled: bool
    ) -> None:
        self.name = name
        self.compiled = compiled
        self.missing_cpu = sorted(needs - flags)
        self.missing_os = [state] if state and state not in flags else []
        self.formats = formats if compiled else []


def _make_machine(monkeypatch: pytest.MonkeyPatch, flags: set[str], not_compiled: tuple[str, ...] = ()) -> Any:
    monkeypatch.setattr(_ext, "cpu_features", lambda: dict.fromkeys(flags, True))
    tiers = [_Tier(*row, flags, row[0] not in not_compiled) for row in LADDER]
    monkeypatch.setattr(_ext, "tiers", lambda: tiers)
    return tiers


@pytest.mark.parametrize(
    ("flags", "int8", "bf16"),
    [
        (set(), "generic", "generic"),
        (HASWELL, "avx2", "avx2"),
        (HASWELL | {"avx_vnni"}, "avx_vnni", "avx2"),
        (SKYLAKE_X, "avx512", "avx512"),
        (CASCADE_LAKE, "avx512_vnni", "avx512"),
        (CASCADE_LAKE | {"avx512_bf16"}, "avx512_vnni", "avx512_bf16"),
        (SAPPHIRE_RAPIDS, "amx", "amx"),
        (SAPPHIRE_RAPIDS - {"os_amx"}, "avx512_vnni", "avx512_bf16"),
        (SAPPHIRE_RAPIDS - {"os_amx", "os_avx512"}, "avx_vnni", "avx2"),
        (SAPPHIRE_RAPIDS - {"os_amx", "os_avx512", "os_avx"}, "generic", "generic"),
    ],
)
def test_no_cpu_falls_to_scalar_code_while_a_vector_tier_fits(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], int8: str, bf16: str
) -> None:
    _make_machine(monkeypatch, flags)
    assert choose_tier(parse_backend("AMXINT8")).tier == int8
    assert choose_tier(parse_backend("AMXBF16")).tier == bf16
    assert choose_tier(parse_backend("INT8")).tier == int8
    assert choose_tier(parse_backend(None)).tier == bf16


@pytest.mark.parametrize(
    ("backend", "tier"),
    [("AVX512INT8", "avx512_vnni"), ("AVX512BF16", "avx512_bf16"), ("AVX2INT8", "avx_vnni"), ("AVX2", "avx2")],
)
def test_a_backend_never_runs_above_its_family(monkeypatch: pytest.MonkeyPatch, backend: str, tier: str) -> None:
    _make_machine(monkeypatch, SAPPHIRE_RAPIDS)
    choice = choose_tier(parse_backend(backend))
    assert (choice.tier, choice.reason) == (tier, "")


def test_amx_wanted_on_a_cpu_without_it_says_what_runs_and_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _make_machine(monkeypatch, HASWELL)
    with caplog.at_level(logging.WARNING, "kt_kernel"):
        for _ in range(3):
            choose_tier(parse_backend("AMXINT8"))
        choose_tier(parse_backend("AMXBF16"))
    assert caplog.messages == [
        "backend AMXINT8 requested, running INT8 on avx2: this CPU has no amx_tile",
        "backend AMXBF16 requested, running BF16 on avx2: this CPU has no amx_tile",
    ]


@pytest.mark.parametrize("backend", ["INT8", "BF16", None])
def test_nothing_is_said_when_no_family_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, backend: str | None
) -> None:
    _make_machine(monkeypatch, HASWELL)
    with caplog.at_level(logging.DEBUG, "kt_kernel"):
        choose_tier(parse_backend(backend), strict=True)
    assert caplog.messages == []


def test_tiles_that_the_process_was_refused_are_the_systems_fault_not_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    _make_machine(monkeypatch, SAPPHIRE_RAPIDS - {"os_amx"})
    choice = choose_tier(parse_backend("AMXINT8"))
    assert choice.tier == "avx512_vnni"
    assert choice.reason == "the operating system or hypervisor does not let this process use the AMX tiles"


def test_a_tier_left_out_of_the_build_is_the_builds_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    _make_machine(monkeypatch, SAPPHIRE_RAPIDS, not_compiled=("amx",))
    choice = choose_tier(parse_backend("AMXINT8"))
    assert (choice.tier, choice.reason) == ("avx512_vnni", "this build has no amx tier for INT8")


def test_strict_turns_the_next_tier_down_into_an_error_that_lists_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    _make_machine(monkeypatch, HASWELL)
    with pytest.raises(UnsupportedCpuError, match="no amx_tile; here run generic, avx2"):
        choose_tier(parse_backend("AMXINT8"), strict=True)


@pytest.mark.parametrize(
    ("variable", "tier"),
    [
        ("CPUINFER_ENABLE_AMX", "avx512_vnni"),
        ("CPUINFER_ENABLE_AVX512", "avx_vnni"),
        ("CPUINFER_ENABLE_AVX2", "generic"),
    ],
)
def test_off_caps_every_tier_from_there_up(monkeypatch: pytest.MonkeyPatch, variable: str, tier: str) -> None:
    _make_machine(monkeypatch, SAPPHIRE_RAPIDS)
    monkeypatch.setenv(variable, "OFF")
    assert choose_tier(parse_backend("INT8")).tier == tier
    choice = choose_tier(parse_backend("AMXINT8"))
    assert (choice.tier, choice.reason) == (tier, f"{variable}=OFF in the environment")


def test_on_never_lifts_above_what_the_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    _make_machine(monkeypatch, HASWELL)
    for variable in ("CPUINFER_ENABLE_AMX", "CPUINFER_ENABLE_AVX512", "CPUINFER_ENABLE_AVX2"):
        monkeypatch.setenv(variable, "ON")
    assert choose_tier(parse_backend("AMXBF16")).tier == "avx2"


def test_a_bad_switch_is_an_error_even_when_another_already_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUINFER_ENABLE_AVX2", "OFF")
    monkeypatch.setenv("CPUINFER_ENABLE_AMX", "sometimes")
    with pytest.raises(ValueError, match="CPUINFER_ENABLE_AMX"):
        choose_tier(parse_backend("INT8"))


def test_families_of_tier_names() -> None:
    assert [family_of(row[0]) for row in LADDER] == ["generic", "avx2", "avx2", "avx512", "avx512", "avx512", "amx"]
    with pytest.raises(KernelError, match="belongs to no ISA family"):
        family_of("sve2")


def test_wrappers_bound_the_family_and_tell_which_tier_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_layer(2, 8, 8).config(1)
    _make_machine(monkeypatch, SAPPHIRE_RAPIDS)
    assert (AMXMoEWrapper(config).tier, AMXMoEWrapper(config).format) == ("amx", "INT8")
    assert (AVX2MoEWrapper(config).tier, AVX2MoEWrapper(config, backend="AMXBF16").tier) == ("avx_vnni", "avx2")
    assert MoEWrapper(config).tier == "amx"
    _make_machine(monkeypatch, HASWELL)
    assert AMXMoEWrapper(config, threads=2).description == "AMXINT8 → INT8 on avx2, 2 threads"
    with pytest.raises(UnsupportedCpuError):
        AMXMoEWrapper(config, strict=True)


def test_a_backend_above_what_the_wrapper_takes_is_said_or_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_layer(2, 8, 8).config(1)
    _make_machine(monkeypatch, SAPPHIRE_RAPIDS)
    with pytest.raises(UnsupportedCpuError, match="strict=True: this wrapper takes nothing above avx2"):
        AVX2MoEWrapper(config, backend="AMXINT8", strict=True)
    with caplog.at_level(logging.WARNING, "kt_kernel"):
        for backend in ("INT8", "AVX2INT8", "AMXINT8", "AMXINT8"):
            assert AVX2MoEWrapper(config, backend=backend, threads=1).tier == "avx_vnni"
    assert caplog.messages == [
        "backend AMXINT8 requested, running INT8 on avx_vnni: this wrapper takes nothing above avx2"
    ]


def test_switching_avx2_off_changes_the_tier_of_this_machine_and_the_result_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_layer(2, 8, 8).config(1)
    assert MoEWrapper(config, backend="INT8").tier == BEST["INT8"]
    monkeypatch.setenv("CPUINFER_ENABLE_AVX2", "OFF")
    assert MoEWrapper(config, backend="INT8").tier == "generic"
    assert "generic" in repr(MoEWrapper(config, backend="INT8"))
