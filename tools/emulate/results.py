"""One emulated run and its verdict; what the tests printed is read by tools/executed, which also makes the table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tools.executed.outcome import ELEMENTWISE
from tools.executed.records import Record


def missing(tiers: Iterable[str], record: Record) -> str | None:
    """The cells of the table that a run of these tiers was to fill and did not."""
    have = {(result.tier, result.column) for result in record.results}
    formats = dict(record.formats)
    wanted = [(tier, column) for tier in tiers for column in (ELEMENTWISE, *formats.get(tier, ()))]
    lacking = [f"{tier} {column}" for tier, column in wanted if (tier, column) not in have]
    return f"no test of {', '.join(lacking)} ran" if lacking else None


@dataclass(frozen=True)
class Run:
    """One boot of the emulator: what it was for, and what came of it."""

    title: str
    record: Record
    seconds: float

    @property
    def passed(self) -> bool:
        return self.record.problem is None


def summary(run: Run) -> str:
    """One line: the run and its verdict."""
    verdict = f"{len(run.record.results)} passed" if run.passed else f"FAILED: {run.record.problem}"
    return f"{run.title} ({run.record.on}): {verdict}, {run.seconds:.0f} s"
