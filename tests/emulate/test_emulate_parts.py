"""The emulator tool's own logic, without an emulator."""

from __future__ import annotations

import io
import re
import struct
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from kt_kernel import _ext
from tools.emulate import bochs_fix, kernel_tests, run_program
from tools.emulate.bochs_fix import LOOP, SIGNED_A, SIGNED_B, Function, moved, sign, symbols
from tools.emulate.emulator import assemble, default_cache
from tools.emulate.errors import EmulationFailed, NotAvailable
from tools.emulate.guest_files import RamDisk, libraries
from tools.emulate.job import Job, Tiles, memory_for, start_info
from tools.emulate.kernel_build import KERNEL
from tools.emulate.kernel_image import HOOK_ROOM, decompress, with_hook
from tools.emulate.output import GuestOutput
from tools.emulate.packages import needed
from tools.emulate.results import missing
from tools.emulate.scenarios import SCENARIOS
from tools.executed.records import keep, record_of

# ---- the fix of the emulator


def test_the_fix_switches_the_extensions_of_the_known_loop_and_nothing_else() -> None:
    code = bytearray(b"\x90" * 7 + LOOP + b"\x90" * 5)
    before = bytes(code)
    sign(code, SIGNED_A + SIGNED_B)
    changed = [i for i, (old, new) in enumerate(zip(before, code, strict=True)) if old != new]
    assert changed == sorted(7 + place for place, _, _ in SIGNED_A + SIGNED_B)


def test_the_fix_refuses_a_loop_that_is_not_there_or_there_twice() -> None:
    for code in (bytearray(b"\x90" * 200), bytearray(LOOP + LOOP), bytearray(LOOP[:-1] + b"\x07")):
        with pytest.raises(NotAvailable, match="not the binary"):
            sign(code, SIGNED_A)


def test_a_moved_body_still_calls_what_it_called() -> None:
    code = bytearray(b"\xe8" + struct.pack("<i", 0x500 - 0x105) + b"\x74\x01\x90\xc3")  # call 0x500; je +1; nop; ret
    old = Function(0x100, len(code))
    body = moved(code, old, 0x900, [(0x100, 0x500), (0x105, 0x108)])
    assert struct.unpack_from("<i", body, 1)[0] == 0x500 - 0x905
    assert body[5:] == code[5:]


def test_a_short_jump_out_of_a_moved_body_is_refused() -> None:
    with pytest.raises(NotAvailable, match="short jump"):
        moved(bytearray(b"\x74\x10"), Function(0x100, 2), 0x900, [(0x100, 0x112)])


def test_an_unknown_binary_is_refused_and_no_copy_is_left(tmp_path: Path) -> None:
    for source in (Path("/bin/true"), Path(__file__)):
        with pytest.raises(NotAvailable, match="not the binary the fix was made for"):
            bochs_fix.fix(source, tmp_path / "fixed")
    assert list(tmp_path.iterdir()) == []


def test_a_binary_without_one_of_the_products_is_refused_by_name() -> None:
    listing = "\n".join(
        f"00000000000{i}0000 0000000000000100 T _ZN8BX_CPU_C{len(name)}{name}_TnnnTrmTregEP7bxInstruction_c"
        for i, name in enumerate(("TDPBSSD", "TDPBSUD", "TMMULTF32PS"))
    )
    with pytest.raises(NotAvailable, match="no symbol TDPBUSD"):
        symbols(listing)


# ---- kernel image, files, disk


def test_the_hook_goes_behind_the_entry_call_and_must_fit() -> None:
    kernel = bytearray(b"\x90" * 256)
    kernel[64] = 0xE8
    kernel[80:86] = b"\x81\xff\x23\x10\x00\x00"
    hooked = with_hook(bytes(kernel), b"HOOK")
    assert hooked[69:73] == b"HOOK"
    assert hooked[:69] + hooked[73:] == bytes(kernel[:69] + kernel[73:])
    with pytest.raises(NotAvailable, match="room"):
        with_hook(bytes(kernel), b"x" * (HOOK_ROOM + 1))
    with pytest.raises(NotAvailable, match="fpu_xstate_prctl"):
        with_hook(b"\x90" * 256, b"HOOK")


def test_the_hook_as_assembled_fits() -> None:
    assert 0 < len(assemble("hook.S")) <= HOOK_ROOM


def test_a_kernel_with_another_compression_is_refused() -> None:
    with pytest.raises(NotAvailable, match="LZ4"):
        decompress(bytes(4096), ["false"])


def test_the_ram_disk_has_folders_before_their_files_and_an_end() -> None:
    disk = RamDisk()
    disk.add("/test/deep/file", b"abc")
    disk.add("test/other", b"")
    image = disk.image()
    names = [b"test\0", b"test/deep\0", b"test/deep/file\0", b"test/other\0", b"TRAILER!!!\0"]
    assert [image.index(name) for name in names] == sorted(image.index(name) for name in names)
    assert image.count(b"070701") == 5
    assert len(image) % 512 == 0


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(EmulationFailed, match="/no/such/file"):
        RamDisk().add_path(Path("/no/such/file"), "x")


def test_libraries_of_a_dynamic_program_include_its_loader() -> None:
    found = [path.name for path in libraries(Path("/bin/ls"))]
    assert any(name.startswith("ld-linux") for name in found)
    assert any(name.startswith("libc.so") for name in found)


def test_start_information_names_the_ram_disk_and_the_memory() -> None:
    info = start_info(1234, 512)
    assert struct.unpack_from("<I", info)[0] == 0x336EC578
    assert struct.unpack_from("<QQ", info, 0x100)[1] == 1234
    assert struct.unpack_from("<QQ", info, 0x200 + 24) == (0x100000, 511 * 2**20)


def test_more_memory_than_the_emulator_has_is_refused() -> None:
    assert memory_for(Job(Path("x")), 0) == 512
    with pytest.raises(EmulationFailed, match="2048 at most"):
        memory_for(Job(Path("x"), memory_mib=4096), 0)


# ---- packages


def test_only_packages_that_the_emulator_loads_are_downloaded() -> None:
    uris = "'http://d/bochs.deb' bochs_3.0+dfsg-1_amd64.deb 1 SHA256:0\n'http://d/s.deb' systemd_257_amd64.deb 1 x\n"
    assert needed(uris) == ["bochs=3.0+dfsg-1"]
    assert needed("'http://d/l.deb' libx_1%3a2_amd64.deb 1 x\n") == ["libx=1:2"]


# ---- the guest's output


def test_output_is_passed_on_as_it_comes_and_the_status_ends_it() -> None:
    output = GuestOutput()
    assert output.feed(b"one\ntwo\n") == b"one\ntwo"  # the last newline may belong to the mark
    assert output.feed(b"three\n\x01EMU-") == b"\nthree"
    assert output.status is None
    assert output.feed(b"EXIT 139\n") == b""
    assert output.status == 139


def test_output_that_ends_without_a_mark_is_not_lost() -> None:
    output = GuestOutput()
    output.feed(b"half a line\n")
    assert output.rest() == b"\n"
    assert output.status is None


# ---- results


def test_a_tier_whose_tests_did_not_all_run_is_told() -> None:
    output = "tiers: amx (INT8, BF16)\nok    a [amx INT8]\nok    b [amx]\n2 tests, 0 failed\n"
    record = record_of("emulated", output, 0)
    assert record.problem is None
    assert missing(("amx",), record) == "no test of amx BF16 ran"
    assert missing(("avx2",), record) == "no test of avx2 elementwise ran"
    assert missing((), record) is None


# ---- the commands


def test_every_tier_has_a_run_on_a_cpu_of_its_own() -> None:
    assert {tier for scenario in SCENARIOS for tier in scenario.tiers} == {tier.name for tier in _ext.tiers()}
    assert [scenario.tiers for scenario in SCENARIOS if scenario.tiles is Tiles.GRANTED] == [("amx",)]


def test_filters_name_the_tier_exactly() -> None:
    (scenario,) = (each for each in SCENARIOS if each.name == "avx512")
    words = scenario.arguments()
    assert words[:2] == ("[avx512 ", "[avx512]")
    assert "--without" in words
    assert "--without" not in scenario.arguments(everything=True)


def test_tiers_that_passed_natively_are_emulated_without_the_long_sweeps(tmp_path: Path) -> None:
    native = "tiers: avx2 (INT8), avx512 (INT8)\nok    a [avx2 INT8]\nok    a [avx512 INT8]\n2 tests, 0 failed\n"
    keep(tmp_path, record_of("native", native, 0))
    keep(tmp_path, record_of("emulated", native.replace("avx512", "amx"), 0))
    natively = kernel_tests.passed_natively(tmp_path)
    assert natively == {"avx2", "avx512"}
    sweeps = {each.name: "hashes: " in each.arguments(natively) for each in SCENARIOS}
    assert [name for name, left_out in sweeps.items() if left_out] == ["avx512", "avx2", "amd", "no-avx"]
    assert kernel_tests.passed_natively(None) == frozenset()
    keep(tmp_path, record_of("native", native.replace("ok    a [avx512", "FAIL  a [avx512"), 1))
    assert kernel_tests.passed_natively(tmp_path) == frozenset()


def test_what_is_left_out_still_has_those_names() -> None:
    sources = "".join(file.read_text() for file in (KERNEL / "tests").glob("test_*.cpp"))
    natively = frozenset(tier.name for tier in _ext.tiers())
    for text in {part for each in SCENARIOS for part in (*each.left_out(natively), *each.extra)}:
        assert re.search(rf'\(\s*"{re.escape(text)}', sources), text


def test_a_mistyped_run_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        kernel_tests.arguments(["avx513"])
    assert "did you mean avx512?" in capsys.readouterr().err


def test_without_names_every_run_is_made() -> None:
    assert kernel_tests.arguments([]).runs == [*(scenario.name for scenario in SCENARIOS), "on-request", "extension"]


def test_the_cache_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KT_EMULATOR_CACHE", str(tmp_path / "here"))
    assert default_cache() == tmp_path / "here"
    monkeypatch.delenv("KT_EMULATOR_CACHE")
    assert default_cache() == Path.home() / ".cache/ktransformers/emulator"


def test_where_there_is_no_emulator_one_line_says_why_and_the_status_is_77(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = io.StringIO()
    with redirect_stdout(said):
        status = kernel_tests.main(["--cache", str(tmp_path / "cache")])
    assert status == 77
    assert said.getvalue().splitlines() == ["emulated tests did not run: no gcc, objcopy on this machine"]


def test_options_of_run_program_become_a_job() -> None:
    words = ["--no-amx", "--add", "a/b", "--add", "c:/d", "--env", "K=V=W", "prog", "--list", "x"]
    job = run_program.job_of(run_program.arguments(words))
    assert job.tiles is Tiles.ABSENT
    assert job.files == ((Path("a/b"), "/test/b"), (Path("c"), "/d"))
    assert job.environment == {"K": "V=W"}
    assert job.arguments == ("--list", "x")
