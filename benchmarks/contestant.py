"""A process that measures when it is asked, and is stopped (SIGSTOP) otherwise: threads of some contestants spin for a
while after their work and would take the next one's cores.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_MARK = "@"  # contestants print of their own accord: only lines that start so are answers


class Contestant:
    """A worker and its times, by what was asked."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        """Starts it. Raises `RuntimeError` when it ends before it is ready."""
        self.name = name
        self.times: dict[Any, list[float]] = {}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._answer()
        self._process.send_signal(signal.SIGSTOP)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        told = self._answer()
        self._process.send_signal(signal.SIGSTOP)
        return dict(json.loads(told))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return line.removeprefix(_MARK)
        raise RuntimeError(f"{self.name} ended without an answer (exit status {self._process.wait()})")


def ready() -> None:
    """The worker's first word, when it has loaded."""
    answer({})


def answer(told: dict[str, Any]) -> None:
    """The worker's answer to one question."""
    sys.stdout.write(f"\n{_MARK}{json.dumps(told)}\n")
    sys.stdout.flush()
