"""Every environment variable the installed package reads, in one place.

Values are read when they are needed, not at import: a program may set `os.environ` until it builds a wrapper. A value
that cannot be understood is a `ConfigError`; it is never ignored. Empty means not set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kt_kernel.errors import ConfigError

__all__ = [
    "ENABLE_AMX",
    "ENABLE_AVX2",
    "ENABLE_AVX512",
    "NUM_THREADS",
    "STRICT_DEVICES",
    "VARIABLES",
    "Variable",
    "describe",
]

T = TypeVar("T")

MOST_THREADS = 4096

_SWITCH = {"on": True, "1": True, "true": True, "yes": True, "off": False, "0": False, "false": False, "no": False}


def _switch(text: str) -> bool:
    try:
        return _SWITCH[text.lower()]
    except KeyError:
        raise ValueError(text) from None


def _thread_count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= MOST_THREADS:
        raise ValueError(text)
    return count


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One variable: what it may hold, what its absence means, what it does."""

    name: str
    allowed: str
    default: str
    meaning: str
    parse: Callable[[str], T]

    def get(self) -> T | None:
        """The value now; None when it is not set. Raises `ConfigError` when it cannot be understood."""
        text = os.environ.get(self.name, "").strip()
        if not text:
            return None
        try:
            return self.parse(text)
        except ValueError:
            raise ConfigError(f"environment variable {self.name} is {text!r}: it takes {self.allowed}") from None


_ON_OFF = "ON or OFF (1/0, true/false, yes/no, in any case)"


def _cap(family: str, falls_to: str) -> Variable[bool]:
    return Variable(
        name=f"CPUINFER_ENABLE_{family}",
        allowed=_ON_OFF,
        default="whatever the CPU has",
        meaning=f"OFF: nothing above {falls_to} runs. ON changes nothing: it never lifts above what the CPU has. "
        f"While building, {family} code is left out (OFF) or compiled in (ON).",
        parse=_switch,
    )


ENABLE_AMX = _cap("AMX", "avx512")
ENABLE_AVX512 = _cap("AVX512", "avx2")
ENABLE_AVX2 = _cap("AVX2", "generic")
NUM_THREADS = Variable(
    name="KT_NUM_THREADS",
    allowed=f"a whole number from 1 to {MOST_THREADS}",
    default="physical cores within the affinity mask, at most the cgroup quota",
    meaning="worker threads of wrappers that were not given `threads`",
    parse=_thread_count,
)
STRICT_DEVICES = Variable(
    name="KT_STRICT_DEVICES",
    allowed=_ON_OFF,
    default="OFF",
    meaning="ON: a device in a rule file that this host lacks is an error. OFF: it becomes cpu, with one warning.",
    parse=_switch,
)

VARIABLES: tuple[Variable[bool] | Variable[int], ...] = (
    ENABLE_AMX,
    ENABLE_AVX512,
    ENABLE_AVX2,
    NUM_THREADS,
    STRICT_DEVICES,
)


def describe() -> list[dict[str, str]]:
    """One dictionary a variable: name, allowed, default, meaning, current ("": not set), problem ("": none)."""
    rows = []
    for variable in VARIABLES:
        problem = ""
        try:
            variable.get()
        except ConfigError as error:
            problem = str(error)
        rows.append(
            {
                "name": variable.name,
                "allowed": variable.allowed,
                "default": variable.default,
                "meaning": variable.meaning,
                "current": os.environ.get(variable.name, ""),
                "problem": problem,
            }
        )
    return rows
