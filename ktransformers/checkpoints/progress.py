"""transformers' progress bars: on a terminal, and where they say something."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging

__all__ = ["progress_bar"]

_logging: Any = logging  # its functions carry no annotations


@contextmanager
def progress_bar(*, shown: bool = True) -> Iterator[None]:
    """Silent when stderr is no terminal, or not `shown`; afterwards as it was."""
    enabled = _logging.is_progress_bar_enabled()
    if not shown or not sys.stderr.isatty():
        _logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            _logging.enable_progress_bar()
