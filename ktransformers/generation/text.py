"""`generate` for text: all at once, or from a thread as it is written."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ktransformers.generation.assembler import TextAssembler, decode

__all__ = ["generate_text", "stream_text"]

# Arguments of transformers' `generate` that would be ignored or lost, with the value that changes nothing.
_REFUSED: dict[str, tuple[object, str]] = {
    "max_length": (None, "it would count the prompt too; say max_new_tokens"),
    "num_return_sequences": (1, "one text is returned; call generate once for each"),
    "return_dict_in_generate": (False, "text is returned; use transformers' own `.model.generate` for scores and ids"),
}


def generate_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: dict[str, torch.Tensor], **kwargs: Any
) -> str:
    """The continuation's text. `kwargs` go to transformers' `generate`."""
    output = _generate_of(model)(**inputs, **_completed(model, tokenizer, kwargs))
    return decode(tokenizer, output[0, inputs["input_ids"].shape[1] :].tolist())


def stream_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: dict[str, torch.Tensor], **kwargs: Any
) -> Iterator[str]:
    """Pieces of the text that `generate_text` gives, as soon as each is certain.

    Generation runs in a thread. What it raises is raised by the iterator; one that is closed or dropped stops it
    within one token.
    """
    if kwargs.get("streamer") is not None:
        raise ValueError("a stream has a streamer of its own: read the iterator, or give streamer to generate")
    return _stream(model, tokenizer, inputs, _completed(model, tokenizer, kwargs))


def _stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, torch.Tensor],
    settings: dict[str, Any],
) -> Iterator[str]:
    abandoned = threading.Event()
    pieces: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()
    criteria = StoppingCriteriaList([*settings.pop("stopping_criteria", ()), _Abandoned(abandoned)])

    def work() -> None:
        try:
            _generate_of(model)(**inputs, **settings, streamer=_Pieces(tokenizer, pieces), stopping_criteria=criteria)
            pieces.put(None)
        except BaseException as error:
            pieces.put(error)

    thread = threading.Thread(target=work, name="ktransformers-generate", daemon=True)
    thread.start()
    try:
        while (piece := pieces.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece
    finally:
        abandoned.set()
        thread.join()


class _Pieces(BaseStreamer):
    """Receives the prompt, then token after token."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, pieces: queue.SimpleQueue[str | BaseException | None]
    ) -> None:
        self._assembler = TextAssembler(tokenizer)
        self._pieces = pieces
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for token in value.flatten().tolist():
            self._send(self._assembler.push(token))

    def end(self) -> None:
        self._send(self._assembler.finish())

    def _send(self, piece: str) -> None:
        if piece:
            self._pieces.put(piece)


class _Abandoned(StoppingCriteria):
    """Ends generation when nobody reads any more."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        return torch.full((input_ids.shape[0],), self._event.is_set(), device=input_ids.device)


def _generate_of(model: PreTrainedModel) -> Any:
    """`generate` without the type that `nn.Module.__getattr__` makes of it."""
    return model.generate


def _completed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any]) -> dict[str, Any]:
    """With what `generate` would otherwise ask for or warn about. Raises `ValueError` for what makes no one text."""
    for name, (harmless, why) in _REFUSED.items():
        if kwargs.get(name) not in (None, harmless):
            raise ValueError(f"{name}={kwargs[name]!r} cannot be had here: {why}")
    settings = {name: value for name, value in kwargs.items() if name != "streamer" or value is not None}
    if settings.get("stop_strings"):
        settings.setdefault("tokenizer", tokenizer)
    if model.generation_config is not None and model.generation_config.pad_token_id is None:
        ends = model.generation_config.eos_token_id
        fallback = ends[0] if isinstance(ends, list) else ends
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else fallback
        settings.setdefault("pad_token_id", pad)
    return settings
