"""Other programs, run with a time-out and an error that says which one failed and with which words."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.emulate.errors import NotAvailable

# Enough for the slowest step (downloading 80 MB, compiling the kernel) on a slow, shared machine.
LONGEST_SECONDS = 1800


def say(text: str) -> None:
    """One line of progress for the person who waits."""
    print(f"emulate: {text}", file=sys.stderr, flush=True)


def require(*programs: str) -> None:
    """Raises NotAvailable naming the programs that are not here."""
    absent = [name for name in programs if shutil.which(name) is None]
    if absent:
        raise NotAvailable(f"no {', '.join(absent)} on this machine")


def last_line(text: str) -> str:
    """The last line that says anything."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def output_of(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = LONGEST_SECONDS,
) -> str:
    """stdout and stderr of a command that must succeed; NotAvailable, with its last line, when it does not."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env=None if env is None else dict(env),
            timeout=timeout,
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except FileNotFoundError:
        raise NotAvailable(f"no {words[0]} on this machine") from None
    except subprocess.TimeoutExpired:
        raise NotAvailable(f"{Path(words[0]).name} did not end within {timeout:.0f} s") from None
    if done.returncode != 0:
        raise NotAvailable(f"{Path(words[0]).name} failed ({done.returncode}): {last_line(done.stdout)}")
    return done.stdout
