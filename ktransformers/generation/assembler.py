"""Tokens to text, piece by piece, such that the pieces joined are what decoding all tokens at once gives."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

__all__ = ["TextAssembler", "decode"]

_INCOMPLETE = "\ufffd"  # what a decoder writes for bytes that are not a character yet


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """The text of `ids` without special tokens, with spaces as they are."""
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


class TextAssembler:
    """Holds back what later tokens may still change: the bytes of an unfinished character, and no more than that.

    Each step decodes the tokens since the last but one piece, so that a tokenizer which strips or joins at the start of
    a text sees no start there.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._text = ""
        self._context = 0  # first token of the window that is decoded
        self._told = 0  # tokens whose text was given out

    def push(self, token: int) -> str:
        """The text that is certain now and was not before; often empty within a character."""
        self._ids.append(token)
        known = decode(self._tokenizer, self._ids[self._context : self._told])
        window = decode(self._tokenizer, self._ids[self._context :])
        if window.endswith(_INCOMPLETE) or not window.startswith(known) or len(window) == len(known):
            return ""
        self._context, self._told = self._told, len(self._ids)
        return self._tell(window[len(known) :])

    def finish(self) -> str:
        """What is left when no token follows, unfinished characters included."""
        whole = decode(self._tokenizer, self._ids)
        return self._tell(whole[len(self._text) :]) if whole.startswith(self._text) else ""

    def _tell(self, piece: str) -> str:
        self._text += piece
        return piece
