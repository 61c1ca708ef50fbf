"""What one way of running the tests left behind, kept as one JSON file in a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.executed.outcome import Result, complaint, parse, tiers


@dataclass(frozen=True)
class Record:
    """One run, or the reason why there was none."""

    how: str  # native, emulated, the sanitizer's name: a column of the table
    on: str = ""  # the CPU, where it is not this machine's
    results: tuple[Result, ...] = ()
    formats: tuple[tuple[str, tuple[str, ...]], ...] = ()  # of each tier that could run, in order
    absent: tuple[tuple[str, str], ...] = ()  # tier, and why it could not run
    problem: str | None = None  # why this is no pass
    not_run: str | None = None  # why nothing ran


def record_of(how: str, output: str, status: int, on: str = "") -> Record:
    """The record of an output of kt_tests, or of several behind each other."""
    results = tuple(parse(output))
    run, absent = tiers(output)
    formats = tuple((tier, tuple(names)) for tier, names in run.items())
    return Record(how, on, results, formats, tuple(absent.items()), complaint(output, status, results))


def keep(folder: Path, record: Record, name: str = "") -> None:
    """Writes the record into the folder, under the name of its run where there are several of its kind."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.]+", "-", name or record.how)
    (folder / f"{stem}.json").write_text(json.dumps(asdict(record), indent=1))


def load(folder: Path) -> list[Record]:
    """All records of a folder, in the order in which they were written."""
    files = sorted(folder.glob("*.json"), key=lambda file: (file.stat().st_mtime_ns, file.name))
    return [_record(json.loads(file.read_text())) for file in files]


def _record(fields: dict[str, object]) -> Record:
    results, formats, absent = (fields.pop(name) for name in ("results", "formats", "absent"))
    assert isinstance(results, list)
    return Record(
        results=tuple(Result(**each) for each in results),
        formats=tuple((tier, tuple(names)) for tier, names in _pairs(formats)),
        absent=tuple((tier, why) for tier, why in _pairs(absent)),
        **fields,  # type: ignore[arg-type]
    )


def _pairs(value: object) -> Iterable[tuple[str, str]]:
    assert isinstance(value, list)
    return [(first, second) for first, second in value]
