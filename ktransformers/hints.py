"""Nearest names, for errors that say what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]


def nearest(word: str, known: Iterable[str], *, count: int = 3, cutoff: float = 0.6) -> list[str]:
    """The known names closest to `word`, best first; case does not count."""
    by_folded: dict[str, str] = {}
    for name in known:
        by_folded.setdefault(name.casefold(), name)
    return [by_folded[folded] for folded in difflib.get_close_matches(word.casefold(), by_folded, count, cutoff)]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean X or Y?`, or all known names when none is close."""
    known = tuple(known)
    close = nearest(word, known)
    return f"did you mean {' or '.join(close)}?" if close else f"there is {', '.join(known) or 'nothing'}"
