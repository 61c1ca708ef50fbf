"""The `kt` command."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

__all__ = ["main"]


def main() -> None:
    """Entry point of `kt`: runs the command line of this process and exits with its code."""
    # torch's OpenMP threads otherwise spin for milliseconds after each of their regions, on cores the kernel needs:
    # decoding was 14 % slower. OpenMP reads this once, when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character is no reason to stop in the middle of a text.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        # Imported here so that `import ktransformers.cli` costs nothing.
        from ktransformers.cli.app import app

        app(prog_name="kt")
    except KeyboardInterrupt:  # before or after the command itself, which has its own words for it
        sys.stderr.write("\nInterrupted.\n")
        raise SystemExit(130) from None


def _open_closed_streams() -> None:
    """Who closed a stream wants nothing of it. Left closed, its number would go to the next file that is opened, and
    whatever a library writes to that stream would go into that file.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 – until the end
