"""Speed of prefill and decode, taken at the tokens themselves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

__all__ = ["TokenClock"]


@dataclass
class TokenClock:
    """Handed to `generate` as a logits processor: it is called once for each forward and changes nothing."""

    started: float = field(default_factory=time.perf_counter)
    prompt_tokens: int = 0
    ticks: list[float] = field(default_factory=list)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Notes the time. `input_ids` (1, tokens so far), `scores` (1, vocabulary) are returned as they are."""
        self.ticks.append(time.perf_counter())
        if len(self.ticks) == 1:
            self.prompt_tokens = input_ids.shape[1]
        return scores

    @property
    def prefill_speed(self) -> float | None:
        """Prompt tokens a second, up to the logits of the first new token."""
        return self.prompt_tokens / (self.ticks[0] - self.started) if self.ticks else None

    @property
    def decode_speed(self) -> float | None:
        """New tokens a second after the first one; None for fewer than two."""
        return (len(self.ticks) - 1) / (self.ticks[-1] - self.ticks[0]) if len(self.ticks) > 1 else None

    def __str__(self) -> str:
        if self.prefill_speed is None:
            return "no token was generated"
        parts = [f"prefill {_tokens(self.prompt_tokens)} at {self.prefill_speed:.1f} tokens/s"]
        if self.decode_speed is not None:
            parts.append(f"decode {_tokens(len(self.ticks) - 1)} at {self.decode_speed:.1f} tokens/s")
        return ", ".join(parts)


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
