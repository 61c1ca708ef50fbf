"""How far a changed model's predictions are from a reference's: perplexity, KL divergence, top-1 agreement.

Independent of ktransformers: a model is anything that maps a window of token ids to logits. Everything is computed
from float32 log-probabilities, and every mean is over tokens, not over windows.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

Logits = Callable[[torch.Tensor], torch.Tensor]
"""Maps the token ids (T,) of a window to its logits (T, vocabulary)."""


@dataclass(frozen=True)
class Accuracy:
    """A changed model against its reference on the same windows of text."""

    perplexity: float
    relative_perplexity: float
    """Changed over reference, less one: 0.005 is half a percent worse."""
    kl: float
    """Mean over tokens of KL(reference || changed), in nats."""
    top1_agreement: float
    """Share of positions whose most likely next token is the same."""


def token_windows(ids: torch.Tensor, length: int) -> list[torch.Tensor]:
    """Cut a row of token ids into windows that do not overlap; a remainder too short to predict from is dropped."""
    if length < 2:
        raise ValueError(f"a window needs at least two tokens to predict one, got {length}")
    return [window for window in torch.split(ids, length) if len(window) >= 2]


def causal_logits(model: torch.nn.Module) -> Logits:
    """A transformers causal language model as `Logits`."""

    def logits(window: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(input_ids=window[None], use_cache=False).logits[0]
        return result

    return logits


@torch.inference_mode()
def log_probabilities(logits: Logits, windows: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Float32 log-probabilities (T, vocabulary) of each window, one at a time."""
    for window in windows:
        yield torch.log_softmax(logits(window).float(), dim=-1)


def perplexity(log_probs: Iterable[torch.Tensor], windows: Sequence[torch.Tensor]) -> float:
    """exp of the mean negative log-likelihood of each token given those before it in its window."""
    total, count = 0.0, 0
    for window_log_probs, window in zip(log_probs, windows, strict=True):
        total += negative_log_likelihood(window_log_probs, window)
        count += len(window) - 1
    return math.exp(total / count)


def negative_log_likelihood(log_probs: torch.Tensor, window: torch.Tensor) -> float:
    """Sum over a window's tokens, the first excepted, of -log p(token | those before it)."""
    return -float(log_probs[:-1].gather(1, window[1:, None]).double().sum())


def kl_divergence(reference: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """KL(reference || changed) of each row of log-probabilities.

    A token the reference gives no probability at all (log-probability -inf) contributes nothing.
    """
    terms = reference.exp() * (reference - changed)
    return terms.masked_fill(reference == -math.inf, 0.0).sum(dim=-1)


def compare(
    reference: Sequence[torch.Tensor], changed: Iterable[torch.Tensor], windows: Sequence[torch.Tensor]
) -> Accuracy:
    """Log-probabilities of a changed model against those of its reference, window by window."""
    reference_nll = changed_nll = divergence = 0.0
    agreeing = predicted = positions = 0
    for before, after, window in zip(reference, changed, windows, strict=True):
        reference_nll += negative_log_likelihood(before, window)
        changed_nll += negative_log_likelihood(after, window)
        predicted += len(window) - 1
        divergence += float(kl_divergence(before, after).double().sum())
        agreeing += int((before.argmax(dim=-1) == after.argmax(dim=-1)).sum())
        positions += len(window)
    return Accuracy(
        perplexity=math.exp(changed_nll / predicted),
        relative_perplexity=math.expm1((changed_nll - reference_nll) / predicted),
        kl=divergence / positions,
        top1_agreement=agreeing / positions,
    )
