"""What an operator will hold and read, told before it has weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Footprint"]


@dataclass(frozen=True)
class Footprint:
    """Of one operator once it is loaded.

    Attributes:
        device: where its weights are, as torch spells it.
        format: of its weights: INT8, BF16, float32, …
        nbytes: bytes of weights it holds itself.
        read_per_token: bytes of weights that one decoded token reads.
        keeps_original: whether the original's float weights stay in memory beside them.
        scratch: bytes of working memory while it computes a long prompt; operators take turns with it.
        details: what `describe()` will say; without "bytes".
    """

    device: str
    format: str
    nbytes: int
    read_per_token: int
    keeps_original: bool
    scratch: int = 0
    details: Mapping[str, str] = field(default_factory=dict)
