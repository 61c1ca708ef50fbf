"""One injection at a time: modules that one thread is replacing are not another thread's to replace."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ktransformers.errors import InjectionError
from ktransformers.injection.slot import Slot
from ktransformers.injection.tree import collapse

__all__ = ["claimed"]

_claimed: set[int] = set()  # ids of originals: their slots keep them alive for as long
_lock = threading.Lock()


@contextmanager
def claimed(slots: Sequence[Slot]) -> Iterator[None]:
    """Holds the slots' originals until the end. Different models, or parts of one, are injected side by side.

    Raises InjectionError, with nothing changed, for a module that another injection holds or has replaced since it was
    found.
    """
    wanted = {id(slot.original) for slot in slots}
    with _lock:
        held = [slot.name for slot in slots if id(slot.original) in _claimed]
        gone = [slot.name for slot in slots if not slot.is_untouched]
        if not held and not gone:
            _claimed.update(wanted)
    if held:
        raise InjectionError(
            f"{'; '.join(collapse(held))} is being replaced by another thread at this moment; wait for it. This "
            "injection changed nothing"
        )
    if gone:
        raise InjectionError(
            f"{'; '.join(collapse(gone))} was replaced by another thread since this injection began, which changed "
            "nothing"
        )
    try:
        yield
    finally:
        with _lock:
            _claimed.difference_update(wanted)
