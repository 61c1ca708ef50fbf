"""Where `kt` writes: results to stdout, everything about them to stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.table import Table

__all__ = ["errors", "hear_requests", "hushed", "listen_to_logs", "plain_table", "results", "say"]

_WIDE = 240
_LOGGERS = ("ktransformers", "kt_kernel")


def results() -> Console:
    """The console of stdout. Made anew, since tests and pipes change the stream."""
    return _console(sys.stdout)


def errors() -> Console:
    """The console of stderr."""
    return _console(sys.stderr)


def _console(stream: TextIO) -> Console:
    # Files and pipes have no width; a wide one keeps a row of a table on one line for grep.
    return Console(file=stream, highlight=False, soft_wrap=True, width=None if stream.isatty() else _WIDE)


def say(text: str) -> None:
    """One line about what happens, on stderr, free of markup."""
    errors().print(text, markup=False)


class _ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def listen_to_logs() -> None:
    """Shows the warnings of our own loggers as plain lines, and quietens transformers' chatter."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
            logger.addHandler(_ToStderr())
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()


def hear_requests() -> None:
    """Shows a line for each request of a server too."""
    logging.getLogger("ktransformers.server").setLevel(logging.INFO)


@contextmanager
def hushed() -> Iterator[None]:
    """Keeps our own loggers' warnings back, for commands that tell the same in their answer."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def plain_table(*columns: str, title: str | None = None) -> Table:
    """A table without lines, as command-line tools print them."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
