"""One thread that generates, one request after the other, and a bounded queue of those that wait."""

from __future__ import annotations

import threading
from collections import deque
from http import HTTPStatus
from typing import Any

import torch
from torch import nn

from ktransformers.log import get_logger
from ktransformers.operators.base import BaseInjectedModule
from ktransformers.server.errors import ApiError
from ktransformers.server.job import CancelledJobError, Job
from ktransformers.server.served import ServedModel

__all__ = ["Engine"]

log = get_logger("server")

DEFAULT_QUEUE = 64  # waiting requests; at minutes each, whoever would be later is better off knowing at once


class Engine:
    """Runs jobs in the order they come. One at a time, since every forward takes all cores of the kernel already.

    A job that is cancelled stops at its next layer or token.
    """

    def __init__(self, served: ServedModel, *, queue: int = DEFAULT_QUEUE) -> None:
        self._served = served
        self._most_waiting = queue
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._hooks = [m.register_forward_pre_hook(self._check_running) for m in _operators(served.model)]
        self._thread = threading.Thread(target=self._work, name="ktransformers-engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """How many jobs are computed now: 0 or 1."""
        return int(self._running is not None)

    @property
    def waiting(self) -> int:
        """How many jobs wait for their turn."""
        with self._changed:
            return sum(not job.cancelled for job in self._waiting)

    def submit(self, job: Job) -> None:
        """Puts `job` at the end of the queue. Raises `ApiError` (503) when the queue is full or the server ends."""
        with self._changed:
            if self._closed:
                raise _shutting_down()
            if self.waiting >= self._most_waiting:
                raise ApiError(
                    f"{self.waiting} requests are waiting already, which is the limit: try again later",
                    status=HTTPStatus.SERVICE_UNAVAILABLE,
                    code="queue_full",
                    headers={"retry-after": "5"},
                )
            self._waiting.append(job)
            self._changed.notify()

    def abort(self) -> None:
        """Takes no more jobs, and ends those that are there: their clients get a 503 at once."""
        with self._changed:
            self._closed = True
            for job in (*self._waiting, *([self._running] if self._running else [])):
                job.fail(_shutting_down())
                job.cancel()
            self._changed.notify()

    def close(self, timeout: float = 5.0) -> None:
        """Aborts, and waits for the thread to end, at most `timeout` seconds."""
        self.abort()
        self._thread.join(timeout)
        for hook in self._hooks:
            hook.remove()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._run(job)
            except CancelledJobError:
                log.info("request %s: stopped after %d tokens, nobody waits for it", job.request_id, job.tokens)
            except BaseException as error:  # one request fails, the thread lives on
                log.error("request %s failed: %s: %s", job.request_id, type(error).__name__, error)
                log.debug("its traceback", exc_info=error)
                job.fail(error)
            finally:
                self._running = None

    def _next(self) -> Job | None:
        """The next job that somebody still waits for; None at the end."""
        with self._changed:
            while not self._closed:
                while self._waiting:
                    job = self._waiting.popleft()
                    if not job.cancelled:
                        self._running = job
                        return job
                self._changed.wait()
            return None

    def _run(self, job: Job) -> None:
        model: Any = self._served.model  # `generate` without the type that `nn.Module.__getattr__` makes of it
        ids = job.input_ids.to(model.device)
        # The seed is this request's alone: neither the next one nor the program's own draws are to follow from it.
        with torch.random.fork_rng(devices=[]):
            torch.seed() if job.seed is None else torch.manual_seed(job.seed)
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=job.config,
                logits_processor=job.processors,
                stopping_criteria=job.stopping_criteria,
            )
        if job.cancelled:
            raise CancelledJobError
        job.end()

    def _check_running(self, *_: Any) -> None:
        """Ends a long prefill between two layers. Only in our thread: the model may be used elsewhere too."""
        job = self._running
        if job is not None and job.cancelled and threading.current_thread() is self._thread:
            raise CancelledJobError


def _operators(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, BaseInjectedModule)]


def _shutting_down() -> ApiError:
    return ApiError("the server is shutting down", status=HTTPStatus.SERVICE_UNAVAILABLE, code="shutting_down")
