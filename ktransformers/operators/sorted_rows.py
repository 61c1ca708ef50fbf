"""Experts that are called with every token times every expert, sorted by expert, as Llama-4's are."""

from __future__ import annotations

import torch

__all__ = ["routing_of_sorted"]


def routing_of_sorted(hidden: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights (E·T, 1) of rows (E·T, H), those of expert 0 first.

    A row of zeros is a token that its router did not send there. Experts without biases make zeros of it, so it gets no
    expert (id −1), and the kernel computes as much as with ids.
    """
    ids = torch.arange(experts, device=hidden.device).repeat_interleave(hidden.shape[0] // experts)
    ids = torch.where(hidden.any(dim=-1), ids, -1)
    return ids[:, None], torch.ones_like(hidden[:, :1], dtype=torch.float32)
