"""How much a model can read and write at once, and whether a prompt and what is to come after it lie within."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ktransformers.log import get_logger

__all__ = ["context_of", "warn_beyond_context"]

_NO_LIMIT = 10**9  # tokenizers say "no limit" with a number beyond this

log = get_logger("generation")


def context_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> int | None:
    """Tokens of prompt and answer together that the model was made for; None where neither config nor tokenizer say."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = (positions, None if tokenizer is None else tokenizer.model_max_length)
    return next((int(limit) for limit in limits if limit and limit < _NO_LIMIT), None)


def warn_beyond_context(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Logs a warning with the numbers where positions come up that the model has not learnt. It runs all the same."""
    known = context_of(model)
    if known is None or known <= 0 or prompt_tokens + max_new_tokens <= known:
        return
    if prompt_tokens > known:
        trouble = f"{prompt_tokens - known} of them lie beyond its context: shorten the prompt"
    else:
        trouble = f"after {known - prompt_tokens} of the up to {max_new_tokens} new ones its context is full"
    log.warning(
        "the prompt has %d tokens and the model's context is %d: %s; what lies beyond may make no sense",
        prompt_tokens,
        known,
        trouble,
    )
