"""Every exception the kernel raises on purpose.

::

    KernelError
    ├── ConfigError (ValueError)          the config dictionary, an argument or an environment variable
    ├── BackendError (ValueError)         a backend name that is unknown or not in this version
    ├── WeightsError (ValueError)         missing, superfluous, misshapen, damaged or not finite weights
    ├── InputError (ValueError)           arrays handed to `forward`
    ├── NotLoadedError (RuntimeError)     `forward` before `load_weights`
    ├── UnsupportedCpuError (RuntimeError) strict was asked for and this machine cannot serve the backend
    └── ForkError (RuntimeError)          an object that cannot be used in a forked process

`KernelError` itself is what a failure inside a worker thread becomes. Running out of memory stays a `MemoryError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from kt_kernel import _ext

__all__ = [
    "BackendError",
    "ConfigError",
    "ForkError",
    "InputError",
    "KernelError",
    "NotLoadedError",
    "UnsupportedCpuError",
    "WeightsError",
]

KernelError = _ext.KernelError
"""Base of the tree. It is the class the C++ library raises, so `except KernelError` misses nothing."""


class ConfigError(KernelError, ValueError):
    """The config dictionary, a constructor argument or an environment variable is not what it has to be."""


class BackendError(KernelError, ValueError):
    """A backend name that is unknown, or known and not in this version."""


class WeightsError(KernelError, ValueError):
    """Weights that are missing, superfluous, misshapen, damaged or not finite."""


class InputError(KernelError, ValueError):
    """Arrays handed to `forward` that the kernel cannot take."""


class NotLoadedError(KernelError, RuntimeError):
    """`forward` was called before `load_weights`."""


class UnsupportedCpuError(KernelError, RuntimeError):
    """`strict=True`, and this machine cannot serve the backend that was asked for."""


class ForkError(KernelError, RuntimeError):
    """An object made before `fork` that cannot be used in the child."""


@contextmanager
def translated(where: str = "") -> Iterator[None]:
    """Turns the C++ library's own exception types into the public ones; `where` goes in front of the text."""
    prefix = f"{where}: " if where else ""
    try:
        yield
    except _ext.WeightsValueError as error:
        raise WeightsError(f"{prefix}{error}") from error
    except _ext.ForkError as error:
        raise ForkError(f"{prefix}{error}") from error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x' or 'y'?`, or nothing when no known name is near. Case does not matter."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=2, cutoff=0.6)
    if not near:
        return ""
    return "; did you mean " + " or ".join(repr(by_lower[match]) for match in near) + "?"
