"""What happens to the logits of a request, beyond what transformers' `generate` has of its own."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor

__all__ = ["CountPenalty", "NotANumberError", "NumbersOnly"]


class NotANumberError(ArithmeticError):
    """The model computed NaN."""


class NumbersOnly(LogitsProcessor):
    """Ends a request whose logits hold a NaN; sampling from them would fail later or, when greedy, write garbage."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """`scores` (1, vocabulary) as they are."""
        if bool(torch.isnan(scores).any()):
            raise NotANumberError("the model computed logits that are not numbers (NaN)")
        return scores


class CountPenalty(LogitsProcessor):
    """OpenAI's two penalties: a token already written `n` times loses `n * frequency`, and `presence` once.

    Source: "Advanced usage: parameter details" of OpenAI's API guide. The prompt does not count.
    """

    def __init__(self, prompt_tokens: int, *, frequency: float, presence: float) -> None:
        self._prompt_tokens = prompt_tokens
        self._frequency = frequency
        self._presence = presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`input_ids` (1, tokens so far), `scores` (1, vocabulary)."""
        counts = torch.zeros_like(scores)
        written = input_ids[:, self._prompt_tokens :]
        counts.scatter_add_(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - counts * self._frequency - (counts > 0).to(scores.dtype) * self._presence
