"""What kt_tests printed, counted by tier and format, and the table that CI and the documentation show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TIERS = ("generic", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx")
FORMATS = ("INT8", "BF16")
# Tests of rotation, quantisation, conversions and gates run once a tier, whatever the format.
ELEMENTWISE = "elementwise"
COLUMNS = (ELEMENTWISE, *FORMATS)

LINE = re.compile(r"^(ok  |FAIL)  (.*?)(?: \(\d+ checks\))?$", re.M)
CASE = re.compile(r"\[(\w+)(?: (\w+))?\]$")
SUMMARY = re.compile(r"^(\d+) tests, (\d+) failed$", re.M)


@dataclass(frozen=True)
class Result:
    """One test: its tier and format, empty for tests that have none."""

    name: str
    passed: bool
    tier: str = ""
    column: str = ""


def parse(output: str) -> list[Result]:
    """The tests in the output of kt_tests."""
    found = []
    for mark, name in LINE.findall(output):
        case = CASE.search(name)
        tier, column = (case[1], case[2] or ELEMENTWISE) if case else ("", "")
        found.append(Result(name, mark == "ok  ", tier, column))
    return found


def complaint(output: str, status: int, results: Sequence[Result]) -> str | None:
    """Why this run is no pass; None when it is one. A run that broke off or held no test is not a pass."""
    failed = [result.name for result in results if not result.passed]
    if failed:
        return f"{len(failed)} failed: " + "; ".join(failed[:3])
    if status == 124:
        return f"time-out after {results[-1].name!r}" if results else "time-out before the first test"
    if status != 0:
        signal = f" (signal {status - 128})" if status > 128 else ""
        return f"exit status {status}{signal}" + (f" after {results[-1].name!r}" if results else "")
    summary = SUMMARY.search(output)
    if summary is None or int(summary[1]) != len(results):
        return "the list of results is not complete"
    return None if results else "no test ran"


def missing(tiers: Iterable[str], results: Sequence[Result]) -> str | None:
    """The cells of the table that a run of these tiers was to fill and did not."""
    have = {(result.tier, result.column) for result in results}
    lacking = [f"{tier} {column}" for tier in tiers for column in COLUMNS if (tier, column) not in have]
    return f"no test of {', '.join(lacking)} ran" if lacking else None


@dataclass(frozen=True)
class Run:
    """One emulated run: which CPU, which tiers were asked for, and what came of it."""

    title: str
    model: str
    tiers: tuple[str, ...]
    results: tuple[Result, ...]
    complaint: str | None
    seconds: float

    @property
    def passed(self) -> bool:
        return self.complaint is None


def _cell(results: Iterable[Result]) -> str:
    outcomes = [result.passed for result in results]
    if not outcomes:
        return "not run"
    failed = outcomes.count(False)
    return f"{failed} of {len(outcomes)} FAILED" if failed else f"{len(outcomes)} passed"


def table(runs: Sequence[Run], not_run: str = "") -> str:
    """Markdown: tier × format × result, with the CPU model that ran it."""
    rows = [["tier", "emulated CPU", *COLUMNS]]
    for tier in TIERS:
        of_tier = [run for run in runs if tier in run.tiers] or [Run("", "–", (tier,), (), not_run or None, 0)]
        for run in of_tier:
            cells = [_cell(r for r in run.results if r.tier == tier and r.column == column) for column in COLUMNS]
            rows.append([tier, run.model, *cells])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in padded]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def summary(run: Run) -> str:
    """One line: the run and its verdict."""
    verdict = f"{len(run.results)} passed" if run.passed else f"FAILED: {run.complaint}"
    return f"{run.title} ({run.model}): {verdict}, {run.seconds:.0f} s"
