"""Giving memory back to the operating system while a model loads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

__all__ = ["give_back"]


def give_back() -> None:
    """Returns what was freed. glibc keeps freed blocks of up to 32 MiB in an arena for each thread that made some:
    hundreds of megabytes after a few layers' tensors. Elsewhere this does nothing.
    """
    _trim()(0)


@cache
def _trim() -> Callable[[int], int]:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return lambda _: 0
    trim.argtypes = [ctypes.c_size_t]
    trim.restype = ctypes.c_int
    return trim
