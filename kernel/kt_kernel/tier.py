"""Which ISA tier serves a backend on this machine, and why not a higher one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kt_kernel import _ext, environment
from kt_kernel.backends import FAMILIES, Backend, Family, Format
from kt_kernel.errors import KernelError, UnsupportedCpuError

__all__ = ["Choice", "Obstacle", "cap", "choose_tier", "family_of", "obstacles"]

logger = logging.getLogger("kt_kernel")

# What the first tier of a family needs, to say why a family is out of reach that this source tree has no tier of.
_FAMILY_NEEDS: dict[Family, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "generic": ((), ()),
    "avx2": (("avx2", "fma", "f16c"), ("os_avx",)),
    "avx512": (("avx512f", "avx512bw", "avx512dq", "avx512vl"), ("os_avx512",)),
    "amx": (("amx_tile",), ("os_amx",)),
}
_STATES = {"os_avx": "the ymm registers", "os_avx512": "the zmm registers", "os_amx": "the AMX tiles"}
_FAMILY_OF_TIER: dict[str, Family] = {"avx_vnni": "avx2"}  # 256-bit registers, no AVX-512 state

_said: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Choice:
    """The tier that runs. `reason` is empty when the backend got the ISA family it asked for."""

    backend: Backend
    tier: str
    reason: str

    @property
    def format(self) -> Format:
        return self.backend.format

    @property
    def sentence(self) -> str:
        text = f"backend {self.backend.name} requested, running {self.format} on {self.tier}"
        return f"{text}: {self.reason}" if self.reason else text


@dataclass(frozen=True)
class Obstacle:
    """One reason why a tier does not run. kind: "environment", "cpu", "os" or "build"."""

    kind: str
    text: str


def family_of(tier: str) -> Family:
    """The ISA family of a tier name: `avx512_vnni` → `avx512`."""
    if tier in _FAMILY_OF_TIER:
        return _FAMILY_OF_TIER[tier]
    for family in FAMILIES:
        if tier == family or tier.startswith(f"{family}_"):
            return family
    raise KernelError(f"tier {tier!r} belongs to no ISA family; families: {', '.join(FAMILIES)}")


def cap() -> tuple[Family, str]:
    """The highest family the environment allows, and the variable that says so ("" when nothing caps).

    OFF caps: AVX512=OFF leaves AVX2 even on a CPU with AMX.
    """
    below: dict[Family, environment.Variable[bool]] = {
        "generic": environment.ENABLE_AVX2,
        "avx2": environment.ENABLE_AVX512,
        "avx512": environment.ENABLE_AMX,
    }
    values = {family: variable.get() for family, variable in below.items()}  # all of them: a bad one is an error
    for family, value in values.items():
        if value is False:
            return family, below[family].name
    return FAMILIES[-1], ""


def _rank(family: Family) -> int:
    return FAMILIES.index(family)


def _capped(family: Family) -> Obstacle | None:
    highest, variable = cap()
    if _rank(family) <= _rank(highest):
        return None
    return Obstacle("environment", f"{variable}=OFF in the environment")


def _missing(features: Sequence[str], states: Sequence[str]) -> list[Obstacle]:
    found = []
    if features:
        found.append(Obstacle("cpu", f"this CPU has no {' and no '.join(features)}"))
    if states:
        registers = " and ".join(_STATES.get(state, state) for state in states)
        found.append(Obstacle("os", f"the operating system or hypervisor does not let this process use {registers}"))
    return found


def obstacles(tier: _ext.TierInfo) -> list[Obstacle]:
    """Everything that keeps a tier from running here, the reason a user can do most about first; empty: it runs."""
    found = []
    if capped := _capped(family_of(tier.name)):
        found.append(capped)
    found += _missing(tier.missing_cpu, tier.missing_os)
    if not tier.compiled:
        found.append(Obstacle("build", f"this build has no {tier.name} tier"))
    return found


def _why_not(family: Family, tiers: Sequence[_ext.TierInfo], format: Format) -> str:
    """The reason why no tier of `family` serves `format`."""
    if capped := _capped(family):
        return capped.text
    features = _ext.cpu_features()
    needs, states = ([name for name in names if not features.get(name, False)] for names in _FAMILY_NEEDS[family])
    if lacking := _missing(needs, states):
        return lacking[0].text
    for tier in tiers:
        if family_of(tier.name) == family and format in tier.formats and (found := obstacles(tier)):
            return found[0].text
    return f"this build has no {family} tier for {format}"


def choose_tier(
    backend: Backend,
    *,
    ceiling: Family | None = None,
    strict: bool = False,
    tiers: Sequence[_ext.TierInfo] | None = None,
) -> Choice:
    """The highest tier that is compiled, possible here, allowed by the environment and not above what was asked for.

    A backend that names no family takes the best there is; `ceiling` bounds any backend. When a family was asked for
    and a lower one runs, on this machine or by `ceiling`, that is said once per process, or is an `UnsupportedCpuError`
    when `strict`.
    """
    known = _ext.tiers() if tiers is None else tiers
    asked = FAMILIES[min(_rank(family) for family in (backend.family or "amx", ceiling or "amx"))]
    usable = [
        tier
        for tier in known
        if _rank(family_of(tier.name)) <= _rank(asked) and backend.format in tier.formats and not obstacles(tier)
    ]
    if not usable:  # only a build without the generic tier gets here
        raise UnsupportedCpuError(f"backend {backend.name} requested: no tier of this build runs {backend.format} here")
    chosen = usable[-1].name
    reason = ""
    if backend.family is not None and _rank(backend.family) > _rank(asked):
        reason = f"this wrapper takes nothing above {asked}"
    elif (backend.family or ceiling) is not None and family_of(chosen) != asked:
        reason = _why_not(asked, known, backend.format)
    choice = Choice(backend, chosen, reason)
    if reason and strict:
        here = ", ".join(tier.name for tier in usable)
        raise UnsupportedCpuError(
            f"backend {backend.name} requested with strict=True: {choice.reason}; "
            f"here run {here}, and without strict {chosen} would be taken"
        )
    if reason and (backend.name, chosen) not in _said:
        _said.add((backend.name, chosen))
        logger.warning("%s", choice.sentence)
    return choice
