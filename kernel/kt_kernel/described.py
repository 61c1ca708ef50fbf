"""What every wrapper tells of itself: the backend that was asked for, and what runs."""

from __future__ import annotations

from kt_kernel.backends import Backend
from kt_kernel.layer_formats import ROTATED

__all__ = ["Described"]


class Described:
    """A wrapper sets `_backend`, `_tier`, `_threads` and `_rotate` when it is made."""

    _backend: Backend
    _tier: str
    _threads: int
    _rotate: bool

    @property
    def tier(self) -> str:
        """ISA tier that runs, e.g. "avx2"."""
        return self._tier

    @property
    def format(self) -> str:
        """Format of the packed weights, such as "INT8" or "BF16"."""
        return self._backend.format

    @property
    def rotated(self) -> bool:
        """Whether weights and activations are rotated before quantising."""
        return self._rotate

    @property
    def _is_rotated(self) -> bool:
        return self._rotate

    @property
    def backend(self) -> str:
        """The backend that was asked for."""
        return self._backend.name

    @property
    def threads(self) -> int:
        """Worker threads, the caller's own included."""
        return self._threads

    @property
    def description(self) -> str:
        """Who runs: "AMXINT8 → INT8 on avx2, 2 threads"."""
        rotation = " (not rotated)" if self.format in ROTATED and not self._is_rotated else ""
        return self.describe(f"{self.format}{rotation}")

    def describe(self, format_name: str) -> str:
        """The same with weights of another format."""
        threads = "1 thread" if self._threads == 1 else f"{self._threads} threads"
        return f"{self.backend} → {format_name} on {self.tier}, {threads}"
