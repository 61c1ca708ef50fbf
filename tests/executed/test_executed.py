"""The table of what was executed how, from made-up results of every kind."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from tools.executed.__main__ import main
from tools.executed.outcome import complaint, parse, tiers
from tools.executed.records import Record, keep, load, record_of
from tools.executed.table import table

PASSING = "tiers: amx (INT8)\nok    gemm: rows [amx INT8]\nok    quantise: zeros [amx]\n2 tests, 0 failed\n"
NATIVE = """tiers: generic (INT8, BF16), avx2 (INT8, BF16, FP9); not run: amx (no amx_tile, amx_int8)
ok    pool: every item
ok    gemm: rows [generic INT8]
ok    gemm: rows [generic BF16]
ok    gemm: rows [avx2 INT8]
ok    bits: threads [avx2 INT8]
ok    gemm: rows [avx2 BF16]
FAIL  gemm: rows [avx2 FP9] (3 checks)
7 tests, 1 failed
"""


def _cells(text: str) -> dict[tuple[str, str], list[str]]:
    """(tier, format) → the cells behind."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return {(row[0], row[1]): row[2:] for row in rows}


def test_results_are_sorted_by_tier_and_format() -> None:
    found = parse("noise\nok    a [b] c [amx INT8]\nFAIL  d [avx2] (3 checks)\nok    features: one\n")
    assert [(r.name, r.passed, r.tier, r.column) for r in found] == [
        ("a [b] c [amx INT8]", True, "amx", "INT8"),
        ("d [avx2]", False, "avx2", "elementwise"),
        ("features: one", True, "", ""),
    ]


def test_tiers_tell_their_formats_or_why_they_did_not_run() -> None:
    assert tiers(NATIVE) == (
        {"generic": ["INT8", "BF16"], "avx2": ["INT8", "BF16", "FP9"]},
        {"amx": "no amx_tile, amx_int8"},
    )
    assert tiers("tiers: generic (INT8)\n") == ({"generic": ["INT8"]}, {})


@pytest.mark.parametrize(
    ("output", "status", "words"),
    [
        (PASSING, 0, None),
        (PASSING + PASSING, 0, None),
        (PASSING + PASSING.rpartition("2 tests")[0], 0, "not complete"),
        (PASSING.replace("ok    gemm", "FAIL  gemm"), 1, "1 failed: gemm: rows"),
        (PASSING.rpartition("2 tests")[0], 132, r"signal 4\) after 'quantise: zeros \[amx\]'"),
        (PASSING.rpartition("2 tests")[0], 0, "not complete"),
        ("ok    a [amx]\n", 124, "time-out after 'a"),
        ("", 124, "time-out before the first test"),
        ("0 tests, 0 failed\n", 0, "no test ran"),
        ("0 tests, 0 failed\n", 1, "exit status 1"),
    ],
)
def test_a_run_passes_only_when_it_is_complete(output: str, status: int, words: str | None) -> None:
    found = complaint(output, status, parse(output))
    assert found is None if words is None else re.search(words, found or "")


def test_tiers_and_formats_nobody_here_has_heard_of_get_their_rows() -> None:
    cells = _cells(table([record_of("native", NATIVE, 1)]))
    assert list(cells) == [
        ("tier", "format"),
        ("generic", "INT8"),
        ("generic", "BF16"),
        ("avx2", "INT8"),
        ("avx2", "BF16"),
        ("avx2", "FP9"),
        ("amx", "–"),
        ("any", "–"),
    ]
    assert cells["avx2", "INT8"] == ["2 passed"]
    assert cells["any", "–"] == ["1 passed"]


def test_every_way_of_running_is_a_column_and_what_did_not_run_says_why() -> None:
    emulated = PASSING.replace("(INT8)", "(INT8, BF16)")
    cells = _cells(
        table(
            [
                record_of("native", NATIVE, 1),
                Record("sanitizer thread", not_run="no sanitizer thread, g++ cannot link: no libtsan"),
                record_of("emulated", emulated, 0, "sapphire_rapids"),
            ]
        )
    )
    assert cells["tier", "format"] == ["native", "sanitizer thread", "emulated"]
    no_sanitizer = "not run: no sanitizer thread, g++ cannot link: no libtsan"
    assert cells["amx", "INT8"] == ["not run: no amx_tile, amx_int8", no_sanitizer, "1 passed (sapphire_rapids)"]
    assert cells["amx", "elementwise"][2] == "1 passed (sapphire_rapids)"
    assert cells["amx", "BF16"][2] == "not run: no test chosen"
    assert cells["generic", "INT8"] == ["1 passed", no_sanitizer, "not run: no test chosen"]


def test_several_runs_of_one_kind_are_counted_together() -> None:
    runs = [record_of("emulated", PASSING, 0, cpu) for cpu in ("haswell", "ryzen")]
    assert _cells(table(runs))["amx", "INT8"] == ["2 passed (haswell, ryzen)"]
    runs.append(record_of("emulated", PASSING, 0, "lynnfield"))
    assert _cells(table(runs))["amx", "INT8"] == ["3 passed (3 CPUs)"]


def test_failures_and_broken_runs_are_loud() -> None:
    broken = PASSING.rpartition("2 tests")[0]
    text = table([record_of("native", NATIVE, 1), record_of("emulated", broken, 132, "ryzen")])
    assert _cells(text)["avx2", "FP9"][0] == "1 of 1 FAILED"
    assert _cells(text)["amx", "INT8"][1] == "1 passed, INCOMPLETE (ryzen)"
    assert "native: FAILED: 1 failed: gemm: rows [avx2 FP9]" in text.splitlines()
    assert "emulated on ryzen: FAILED: exit status 132 (signal 4) after 'quantise: zeros [amx]'" in text.splitlines()


def test_records_come_back_from_their_folder_in_the_order_of_the_runs(tmp_path: Path) -> None:
    records = [
        record_of("native", NATIVE, 1),
        Record("emulated", not_run="no Debian archive"),
        record_of("sanitizer address,undefined", PASSING, 0),
    ]
    for record in records:
        keep(tmp_path / "new", record)
    assert load(tmp_path / "new") == records
    keep(tmp_path / "new", records[0])
    assert len(load(tmp_path / "new")) == 3


def test_the_command_keeps_and_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(NATIVE))
    assert main(["record", folder, "native", "1"]) == 0
    assert main(["not-run", folder, "emulated", "no gcc"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["table", folder]) == 0
    assert _cells(capsys.readouterr().out)["generic", "BF16"] == ["1 passed", "not run: no gcc"]


def test_other_words_are_answered_with_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record"]) == 2
    assert "python -m tools.executed table FOLDER" in capsys.readouterr().err


def test_a_folder_without_records_makes_a_table_without_rows(tmp_path: Path) -> None:
    assert _cells(table(load(tmp_path / "none"))) == {("tier", "format"): []}
