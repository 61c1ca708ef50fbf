"""How much a model can read and write at once."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["context_of"]

_NO_LIMIT = 10**9  # tokenizers say "no limit" with a number beyond this


def context_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Tokens of prompt and answer together that the model was made for; None where neither config nor tokenizer say."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = (positions, tokenizer.model_max_length)
    return next((int(limit) for limit in limits if limit and limit < _NO_LIMIT), None)
