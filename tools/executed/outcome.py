"""What kt_tests printed: its tests by tier and format, and the tiers that it could not run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# Tests of rotation, quantisation, conversions and gates run once a tier, whatever the format.
ELEMENTWISE = "elementwise"

LINE = re.compile(r"^(ok  |FAIL)  (.*?)(?: \(\d+ checks\))?$", re.M)
CASE = re.compile(r"\[(\w+)(?: (\w+))?\]$")
SUMMARY = re.compile(r"^(\d+) tests, (\d+) failed$", re.M)
# The first line of kt_tests. In its second part each tier is followed by why it did not run.
TIERS = re.compile(r"^tiers: (.*?)(?:; not run: (.*))?$", re.M)
TIER = re.compile(r"(\w+) \(([^()]*)\)")


@dataclass(frozen=True)
class Result:
    """One test: its tier and format, empty for tests that have none."""

    name: str
    passed: bool
    tier: str = ""
    column: str = ""


def parse(output: str) -> list[Result]:
    """The tests in the output of kt_tests, or in that of several."""
    found = []
    for mark, name in LINE.findall(output):
        case = CASE.search(name)
        tier, column = (case[1], case[2] or ELEMENTWISE) if case else ("", "")
        found.append(Result(name, mark == "ok  ", tier, column))
    return found


def tiers(output: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Tier → its formats, of those that could run; tier → why not, of the others."""
    run: dict[str, list[str]] = {}
    absent: dict[str, str] = {}
    for had, lacked in TIERS.findall(output):
        run |= {name: formats.split(", ") for name, formats in TIER.findall(had)}
        absent |= dict(TIER.findall(lacked))
    return run, absent


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
    counts = [int(count) for count, _ in SUMMARY.findall(output)]
    if not counts or sum(counts) != len(results):
        return "the list of results is not complete"
    return None if results else "no test ran"
