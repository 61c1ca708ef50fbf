"""What `kt run`, `kt serve` and `kt chat` say when the model is there: which rule put what where, and what runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ktransformers.cli.console import say

if TYPE_CHECKING:
    from ktransformers.injection import Report

__all__ = ["announce"]


def announce(report: Report | None, *, verbose: bool = False) -> None:
    """One line on stderr for each range of layers (`verbose`: for each module): rule, backend asked for, what runs."""
    lines = report.lines(verbose=verbose) if report is not None else []
    for line in lines or ["experts: transformers' own, no rule replaced any"]:
        say(line)
