"""One part of a checkpoint is read while the one before is packed, and never more."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

import pytest

from ktransformers.checkpoints.readahead import read_ahead


def _job(number: int, started: Event, go_on: Event) -> Callable[[], int]:
    def run() -> int:
        started.set()
        assert go_on.wait(30)
        return number

    return run


def test_the_next_job_runs_while_a_result_is_in_use_and_the_one_after_it_waits() -> None:
    started, go_on = [Event() for _ in range(3)], Event()
    go_on.set()
    reads = read_ahead([_job(number, event, go_on) for number, event in enumerate(started)])
    assert not started[0].is_set()  # nothing is read before it is asked for
    assert next(reads) == 0
    assert started[1].wait(30)
    assert not started[2].is_set()
    assert list(reads) == [1, 2]


def test_an_error_comes_in_its_turn() -> None:
    def fail() -> int:
        raise OSError("gone")

    reads = read_ahead([lambda: 0, fail, lambda: 2])
    assert next(reads) == 0
    with pytest.raises(OSError, match="gone"):
        next(reads)
    assert list(reads) == []


def test_closing_waits_for_the_job_that_runs() -> None:
    started, go_on, done = Event(), Event(), []

    def last() -> int:
        started.set()
        go_on.wait(30)
        done.append(True)
        return 1

    reads = read_ahead([lambda: 0, last, lambda: pytest.fail("nobody asked for it")])
    assert next(reads) == 0
    assert started.wait(30)
    go_on.set()
    reads.close()
    assert done == [True]
