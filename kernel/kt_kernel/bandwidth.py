"""How fast this machine reads memory: the ceiling of decoding, which reads every active weight once a token."""

from __future__ import annotations

import psutil

from kt_kernel.contexts import resolve_threads, shared_context
from kt_kernel.errors import translated

__all__ = ["read_bandwidth"]

# Beyond the last-level cache of common servers: what a cache answers says nothing about memory.
_MOST = 512 << 20
# A probe must not be what runs a small container out of memory.
_SHARE_OF_FREE = 8


def read_bandwidth(threads: int | None = None) -> float:
    """Bytes a second that the kernel's threads read together, measured now in a few tenths of a second.

    Reads up to 512 MiB, an eighth of the free memory at most. `threads` as for a wrapper. Raises `ConfigError` for an
    impossible number of threads, `MemoryError` where there is not even that much.
    """
    context = shared_context(resolve_threads(threads))
    size = min(_MOST, psutil.virtual_memory().available // _SHARE_OF_FREE)
    with translated():
        return context.read_bandwidth(size)
