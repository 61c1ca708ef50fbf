"""A progress bar on stderr for long work; nothing at all when stderr is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["track"]


@contextmanager
def track(description: str, total: int, *, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with the name of each item when it is done."""
    console = Console(stderr=True)
    if not shown or not console.is_terminal or total == 0:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda name: progress.update(task, advance=1, description=f"{description} {name}")
