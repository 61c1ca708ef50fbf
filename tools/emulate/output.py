"""Takes the guest's stream apart: the program's output, then a mark with its exit status."""

from __future__ import annotations

import re

END = re.compile(rb"\n?\x01EMU-EXIT (\d+)\n")
MARK_START = b"\n\x01"


class GuestOutput:
    """Feed it what arrived; it returns what may be shown, and knows the status once the end mark has come."""

    def __init__(self) -> None:
        self._kept = b""
        self.status: int | None = None

    def feed(self, data: bytes) -> bytes:
        self._kept += data
        end = END.search(self._kept)
        if end:
            self.status = int(end[1])
            return self._take(end.start(), drop_rest=True)
        # What may be the beginning of the end mark waits for the rest.
        mark = self._kept.rfind(MARK_START)
        return self._take(mark if mark >= 0 else len(self._kept) - self._kept.endswith(b"\n"))

    def rest(self) -> bytes:
        """What is left when the stream ended without a mark."""
        return self._take(len(self._kept))

    def _take(self, count: int, *, drop_rest: bool = False) -> bytes:
        taken, self._kept = self._kept[:count], b"" if drop_rest else self._kept[count:]
        return taken
