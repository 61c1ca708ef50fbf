"""Reading the next part of a checkpoint while this one is packed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["read_ahead"]

T = TypeVar("T")


def read_ahead(jobs: Iterable[Callable[[], T]]) -> Generator[T]:
    """The jobs' results in order. One job is ahead of the caller, on a thread of its own; an error of a job is raised
    when its result is asked for. Closing the iterator waits for the job that runs.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="kt-read") as pool:
        waiting = iter(jobs)
        ahead = next(waiting, None)
        future = pool.submit(ahead) if ahead is not None else None
        while future is not None:
            result = future.result()
            ahead = next(waiting, None)
            future = pool.submit(ahead) if ahead is not None else None
            yield result
            del result  # the caller alone decides how long it lives
