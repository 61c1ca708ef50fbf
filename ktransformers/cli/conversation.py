"""A conversation with a loaded model: its history, and the next answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ktransformers.cli.clock import TokenClock
from ktransformers.cli.failures import WrongInputError
from ktransformers.generation import context_of, encode, stream_text

__all__ = ["Conversation"]


class Conversation:
    """Turns of user and model, each sent with all before it. `options` are for transformers' `generate`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None,
        max_new_tokens: int,
        **options: Any,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._system = system
        self._most = max_new_tokens
        self._options = options
        self._context = context_of(model, tokenizer)
        self.messages: list[dict[str, str]] = []
        self.clock = TokenClock()
        """Speed and count of the last answer."""
        self.cut = False
        """Whether the last answer ended at the limit of tokens."""
        self.reset()

    def reset(self) -> None:
        """Forgets all but the system message."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def prompt(self, text: str) -> tuple[str, list[int]]:
        """What the model would get to read for this turn: the text in its template, and the ids."""
        ids = self._encode([*self.messages, {"role": "user", "content": text}])["input_ids"][0].tolist()
        return str(self._tokenizer.decode(ids)), ids

    def answer(self, text: str) -> Iterator[str]:
        """Pieces of the model's answer to `text`. The turn enters the history when the iterator ends, also early.

        Raises `WrongInputError` before anything is computed: the template refuses the messages, or they fill the
        context.
        """
        turn = {"role": "user", "content": text}
        inputs = self._encode([*self.messages, turn])
        limit = min(self._most, self._room(inputs["input_ids"].shape[-1]))
        self.clock = TokenClock()
        options = {**self._options, "max_new_tokens": limit, "logits_processor": [self.clock]}
        return self._told(turn, limit, stream_text(self._model, self._tokenizer, inputs, **options))

    def _told(self, turn: dict[str, str], limit: int, pieces: Iterator[str]) -> Iterator[str]:
        said = ""
        try:
            for piece in pieces:
                said += piece
                yield piece
        finally:
            self.cut = len(self.clock.ticks) >= limit
            self.messages += [turn, {"role": "assistant", "content": said}]

    def _encode(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        try:
            return encode(self._tokenizer, messages, chat=True, device=self._model.device)
        except TemplateError as error:
            raise WrongInputError(f"the model's chat template refuses these messages: {error}") from error
        except ValueError as error:
            raise WrongInputError(str(error)) from error

    def _room(self, prompt_tokens: int) -> int:
        if self._context is None:
            return self._most
        if prompt_tokens >= self._context:
            raise WrongInputError(
                f"the conversation has {prompt_tokens} tokens with this turn, the model reads {self._context}: "
                "/reset begins a new one"
            )
        return self._context - prompt_tokens
