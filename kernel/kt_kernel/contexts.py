"""Thread pools: how many threads, and one pool for all wrappers that want the same number."""

from __future__ import annotations

import logging
from weakref import WeakValueDictionary

from kt_kernel import _ext
from kt_kernel.environment import MOST_THREADS, NUM_THREADS
from kt_kernel.errors import ConfigError

__all__ = ["resolve_threads", "shared_context"]

logger = logging.getLogger("kt_kernel")

# No lock: two threads that race here at worst make a pool that is dropped again, and a lock could be held across fork.
_contexts: WeakValueDictionary[int, _ext.Context] = WeakValueDictionary()
_said: set[int] = set()


def resolve_threads(threads: int | None) -> int:
    """An explicit number, else `KT_NUM_THREADS`, else what the machine and its limits allow.

    An explicit number is honoured; one above the limits is mentioned once. Raises `ConfigError` for an impossible one.
    """
    whole = isinstance(threads, int) and not isinstance(threads, bool)
    if threads is not None and not (whole and 1 <= threads <= MOST_THREADS):
        raise ConfigError(f"threads is {threads!r}; it has to be a whole number from 1 to {MOST_THREADS}, or None")
    wanted = NUM_THREADS.get() if threads is None else threads
    budget = _ext.topology().default_threads
    if wanted is None:
        return budget
    if wanted > budget and wanted not in _said:
        _said.add(wanted)
        logger.warning("%d threads asked for; this process has %d physical core(s), more is slower", wanted, budget)
    return wanted


def shared_context(threads: int) -> _ext.Context:
    """The process's pool of that many threads; it lives as long as a wrapper uses it."""
    context = _contexts.get(threads)
    if context is None:
        context = _contexts.setdefault(threads, _ext.Context(threads))
    return context
