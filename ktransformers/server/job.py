"""One request while it is computed: takes tokens from the engine's thread, gives pieces of the answer to the loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from http import HTTPStatus
from typing import Any, Literal, TypeAlias

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers import PreTrainedTokenizerBase as Tokenizer

from ktransformers.generation import TextAssembler
from ktransformers.server.errors import ApiError
from ktransformers.server.stops import StopFilter

__all__ = ["CancelledJobError", "Job", "Parser", "Piece"]

Piece: TypeAlias = Any
"""`str`, or what transformers' parser makes of it: `ReasoningText`, `ToolCall`."""

Parser: TypeAlias = Any
"""transformers' `ResponseParser`: untyped, and with methods `feed` and `finalize` that give events."""


class CancelledJobError(Exception):
    """Nobody waits for this answer any more."""


class Job(StoppingCriteria):
    """One request, and the criterion by which `generate` stops. `async for piece in job` gives the answer.

    Tokens are taken where `generate` asks whether to go on, since a streamer gets a token only after that: a stop
    string would be seen one token too late.
    """

    def __init__(
        self,
        request_id: str,
        input_ids: torch.Tensor,
        config: GenerationConfig,
        processors: LogitsProcessorList,
        tokenizer: Tokenizer,
        *,
        seed: int | None,
        stops: Sequence[str],
        parser: Parser | None,
    ) -> None:
        """`input_ids`: (1, tokens) of the prompt. `parser` tells reasoning and tool calls from text."""
        self.request_id = request_id
        self.input_ids = input_ids
        self.config = config
        self.processors = processors
        self.seed = seed
        self.stopping_criteria = StoppingCriteriaList([self])
        self.tokens = 0
        """How many tokens were written so far, end token and stop string included."""
        self.finish_reason: Literal["stop", "length"] = "length"
        self.started = time.perf_counter()
        self._ends = _as_set(config.eos_token_id)
        self._assembler = TextAssembler(tokenizer, skip_special_tokens=parser is None)
        self._stops = StopFilter(stops)
        self._parser = parser
        self._cancelled = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()

    @property
    def prompt_tokens(self) -> int:
        return int(self.input_ids.shape[-1])

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Nobody reads any more: it is not begun, or stops at its next layer or token."""
        self._cancelled.set()

    def fail(self, error: BaseException) -> None:
        """Ends the answer with an error."""
        text = f"the request failed in the model: {type(error).__name__}: {error}"
        self._send(error if isinstance(error, ApiError) else ApiError(text, status=HTTPStatus.INTERNAL_SERVER_ERROR))

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """The pieces, as each is certain. Raises the `ApiError` of a failure. Left early, the job is cancelled."""
        try:
            while (piece := await self._pieces.get()) is not None:
                if isinstance(piece, ApiError):
                    raise piece
                yield piece
        finally:
            self.cancel()

    # Called in the engine's thread, by `generate`.

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        """Takes what is new in `input_ids` (1, prompt and answer so far); True, (1,), where nothing more is wanted."""
        if (parser := self._parser) is not None and self.tokens == 0:
            self._tell(lambda: parser.initial_events)
        for token in input_ids[0, self.prompt_tokens + self.tokens :].tolist():
            self.tokens += 1
            if token in self._ends:
                self.finish_reason = "stop"
                if self._parser is None:  # an end token is no text, even where it is not marked as special
                    continue
            self._text(self._assembler.push(token))
        return torch.full((1,), self.cancelled or self._stops.found, device=input_ids.device)

    def end(self) -> None:
        """Gives what was held back, and the word that this was all."""
        self._text(self._assembler.finish())
        rest = self._stops.finish()
        if rest:
            self._give(rest)
        if (parser := self._parser) is not None:
            self._tell(lambda: parser.finalize()[1], at_end=True)
        self._send(None)

    def _text(self, text: str) -> None:
        certain = self._stops.push(text)
        if self._stops.found:
            self.finish_reason = "stop"
        if certain:
            self._give(certain)

    def _give(self, text: str) -> None:
        if (parser := self._parser) is None:
            self._send(text)
        else:
            self._tell(lambda: parser.feed(text))

    def _tell(self, events: Callable[[], Any], *, at_end: bool = False) -> None:
        """Sends the parser's events on."""
        from transformers.cli.serving.utils import response_events_to_chunks

        try:
            pieces = response_events_to_chunks(events())
        except (ValueError, RuntimeError) as error:
            if at_end and self.finish_reason == "length":  # cut within a tool call: what was complete was sent
                return
            raise ApiError(
                f"the model's answer is not what its response template describes: {error}",
                status=HTTPStatus.INTERNAL_SERVER_ERROR,
            ) from error
        for piece in pieces:
            self._send(piece)

    def _send(self, piece: Piece | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)
        except RuntimeError:  # the loop has ended, and with it whoever would read
            self.cancel()


def _as_set(tokens: Any) -> frozenset[int]:
    """Of a generation config's end tokens: none, one, a list or a tensor."""
    if tokens is None:
        return frozenset()
    return frozenset(torch.as_tensor(tokens).flatten().tolist())
