"""Tokens to text, piece by piece, such that the pieces joined are what decoding all tokens at once gives."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

__all__ = ["TextAssembler", "decode"]

_INCOMPLETE = "\ufffd"  # what a decoder writes for bytes that are not a character yet
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a byte that SentencePiece vocabularies have no piece for


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, skip_special_tokens: bool = True) -> str:
    """The text of `ids`, without special tokens unless they are wanted, with spaces as they are."""
    text = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


class TextAssembler:
    """Holds back what later tokens may still change: the bytes of an unfinished character, and no more than that. A run
    of SentencePiece's byte tokens is text or garbage as a whole, so it is held back until it ends.

    Each step decodes the tokens since the last but one piece, so that a tokenizer which strips or joins at the start of
    a text sees no start there.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._text = ""
        self._context = 0  # first token of the window that is decoded
        self._told = 0  # tokens whose text was given out

    def push(self, token: int) -> str:
        """The text that is certain now and was not before; often empty within a character."""
        self._ids.append(token)
        if self._is_byte(token):
            return ""
        known = self._decode(self._ids[self._context : self._told])
        window = self._decode(self._ids[self._context :])
        if window.endswith(_INCOMPLETE) or not window.startswith(known) or len(window) == len(known):
            return ""
        self._context, self._told = self._told, len(self._ids)
        return self._tell(window[len(known) :])

    def finish(self) -> str:
        """What is left when no token follows, unfinished characters included."""
        whole = self._decode(self._ids)
        return self._tell(whole[len(self._text) :]) if whole.startswith(self._text) else ""

    def _decode(self, ids: list[int]) -> str:
        return decode(self._tokenizer, ids, skip_special_tokens=self._skip_special_tokens)

    def _is_byte(self, token: int) -> bool:
        name = self._tokenizer.convert_ids_to_tokens(token)
        return isinstance(name, str) and _BYTE.fullmatch(name) is not None

    def _tell(self, piece: str) -> str:
        self._text += piece
        return piece
