"""Whether a prompt and what is to come after it lie within what the model was made for."""

from __future__ import annotations

from transformers import PreTrainedModel

from ktransformers.log import get_logger

__all__ = ["warn_beyond_context"]

log = get_logger("generation")


def warn_beyond_context(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Logs a warning with the numbers where positions come up that the model has not learnt. It runs all the same."""
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(known, int) or known <= 0 or prompt_tokens + max_new_tokens <= known:
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
