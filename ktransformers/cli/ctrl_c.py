"""Ctrl-C in a conversation: heard where it stops something, and ignored between.

A key pressed when the answer has just ended would otherwise end the program, and the conversation with it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["CtrlC"]


class CtrlC:
    """What Ctrl-C does from here on. Of the main thread: no other may say what signals do."""

    def __init__(self) -> None:
        self._usual = signal.getsignal(signal.SIGINT)

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Nothing happens at Ctrl-C until the block ends, but within `heard`."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._usual)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Ctrl-C raises `KeyboardInterrupt` here, as usual. To catch it, have the whole block within the `try`."""
        between = signal.signal(signal.SIGINT, self._usual)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, between)
