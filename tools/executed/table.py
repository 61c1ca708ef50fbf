"""One table of all records: tier × format × how executed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tools.executed.outcome import ELEMENTWISE
from tools.executed.records import Record

NO_TIER, NO_FORMAT = "any", "–"  # tests of threads, packing and detection belong to no tier
MOST_NAMED = 2  # CPUs in a cell: a table must stay readable


def table(records: Sequence[Record]) -> str:
    """Markdown: a row for every tier and format that a record names, a column for every way; then what went wrong."""
    ways = _unique(record.how for record in records)
    lines = [["tier", "format", *ways]]
    for tier, column in _rows(records):
        cells = [_cell([r for r in records if r.how == way], tier, column) for way in ways]
        lines.append([tier or NO_TIER, column or NO_FORMAT, *cells])
    problems = [
        f"{' on '.join(filter(None, (record.how, record.on)))}: FAILED: {record.problem}"
        for record in records
        if record.problem
    ]
    return "\n".join([_aligned(lines), *problems])


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _rows(records: Sequence[Record]) -> list[tuple[str, str]]:
    ran = [(result.tier, result.column) for record in records for result in record.results]
    could = [(tier, name) for record in records for tier, formats in record.formats for name in formats]
    tiers = _unique(
        [*(tier for tier, _ in could), *(t for r in records for t, _ in r.absent), *(t for t, _ in ran if t)]
    )
    rows = []
    for tier in tiers:
        columns = _unique(column for each, column in (*could, *ran) if each == tier and column != ELEMENTWISE)
        elementwise = [ELEMENTWISE] if (tier, ELEMENTWISE) in ran else []
        rows += [(tier, column) for column in (*elementwise, *columns)] or [(tier, "")]
    return rows + ([("", "")] if ("", "") in ran else [])


def _cell(records: Sequence[Record], tier: str, column: str) -> str:
    having = [r for r in records if any((result.tier, result.column) == (tier, column) for result in r.results)]
    if not having:
        return f"not run: {_reason(records, tier)}"
    outcomes = [each.passed for r in having for each in r.results if (each.tier, each.column) == (tier, column)]
    failed = outcomes.count(False)
    text = f"{failed} of {len(outcomes)} FAILED" if failed else f"{len(outcomes)} passed"
    where = _unique(r.on for r in having if r.on)
    unfinished = "" if failed or all(_is_whole(r) for r in having) else ", INCOMPLETE"
    if not tier or not where:
        return text + unfinished
    return f"{text}{unfinished} ({', '.join(where) if len(where) <= MOST_NAMED else f'{len(where)} CPUs'})"


def _is_whole(record: Record) -> bool:
    """Failed tests are counted where they belong; what broke off concerns all the others of its run."""
    return record.problem is None or not all(result.passed for result in record.results)


def _reason(records: Sequence[Record], tier: str) -> str:
    for record in records:
        if record.not_run:
            return record.not_run
        if tier in dict(record.absent):
            return dict(record.absent)[tier]
    for record in records:
        if record.problem and not record.results:
            return record.problem
    return "no test chosen"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in padded]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
