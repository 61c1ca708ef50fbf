"""Stop strings: found across pieces, never shown, not even in part."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopFilter"]


class StopFilter:
    """Passes text on until one of `stops` occurs. Holds back the end of it that may still become one, and no more."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """What is certain to come before any stop string. Nothing once one was found."""
        if self.found:
            return ""
        held = self._held + text
        places = [(place + len(stop), place) for stop in self._stops if (place := held.find(stop)) >= 0]
        if places:  # the one complete first, so that it does not matter how the text was cut
            self.found, self._held = True, ""
            return held[: min(places)[1]]
        keep = max((self._overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """The text held back, when none follows."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that `stop` begins with."""
        longest = min(len(text), len(stop) - 1)
        return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
