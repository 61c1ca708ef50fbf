"""`kt doctor --explain BACKEND`: does it run here, on what, and why not on more."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Explanation", "explain_backend"]


@dataclass(frozen=True)
class Explanation:
    """The answer. `why` is empty when the backend gets the instructions it asks for."""

    backend: str
    meaning: str
    format: str
    tier: str
    why: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        reason = f": {self.why}" if self.why else ""
        return f"{self.backend}: {self.meaning}\nruns here: yes, as {self.format} on {self.tier}{reason}"


def explain_backend(name: str) -> Explanation:
    """How a backend runs on this machine. Raises `kt_kernel.BackendError`, with the nearest names, when it does not."""
    import kt_kernel
    from kt_kernel.tier import choose_tier

    backend = kt_kernel.parse_backend(name)
    choice = choose_tier(backend)
    return Explanation(backend.name, backend.meaning, backend.format, choice.tier, choice.reason)
