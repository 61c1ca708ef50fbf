"""`--chat-template`: the form in which a conversation is written down for the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ktransformers.cli.failures import WrongInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ktransformers import KTransformer

__all__ = ["read_template", "tokenizer_of"]


def read_template(path: Path | None) -> str | None:
    """The chat template in a file, where one is given. Raises `WrongInputError` for one that cannot be read."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WrongInputError(f"the chat template {path} cannot be read: {error}") from error


def tokenizer_of(loaded: KTransformer, template: str | None) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with `template` in the place of its own. Raises `WrongInputError` where there is none."""
    if loaded.tokenizer is None:
        raise WrongInputError(f"{loaded.folder} has no tokenizer: what people write cannot be read by this model")
    if template is not None:
        loaded.tokenizer.chat_template = template
    return loaded.tokenizer
