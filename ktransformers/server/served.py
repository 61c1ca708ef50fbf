"""The one model that is served, in the place of transformers' manager of many."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ktransformers.server.errors import ApiError

__all__ = ["ServedModel"]


class ServedModel:
    """Answers what transformers' routes ask their model manager. It holds no code that loads or unloads anything, so no
    request can.

    `context` is the number of tokens of prompt and answer together; None where the model has no limit.
    """

    def __init__(
        self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, context: int | None
    ) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.context = context
        self._created = int(time.time())
        # The first call may change how the tokenizer pads and cuts, which breaks a call of another thread meanwhile.
        tokenizer("")

    def check_name(self, asked: str | None) -> None:
        """Raises the 404 of the OpenAI API for the name of another model. A request need not name one."""
        if asked is not None and asked != self.name:
            raise ApiError(
                f'the model "{asked}" is not served here; this server has "{self.name}"',
                status=HTTPStatus.NOT_FOUND,
                param="model",
                code="model_not_found",
            )

    def describe(self) -> dict[str, Any]:
        """One entry of `/v1/models`. `max_model_len` is the field that other servers tell the context in."""
        entry: dict[str, Any] = {"id": self.name, "object": "model", "created": self._created, "owned_by": "local"}
        return entry if self.context is None else {**entry, "max_model_len": self.context}

    # The names that transformers' routes call.

    def list_models(self) -> list[dict[str, Any]]:
        """For `/v1/models`."""
        return [self.describe()]

    @staticmethod
    def process_model_name(name: str) -> str:
        """transformers adds a revision here; our model has none."""
        return name

    def load_model_streaming(self, name: str, gguf_file: str | None = None) -> AsyncIterator[str]:
        """For `/load_model`, which `transformers chat` calls first: the model is there."""
        self.check_name(name if gguf_file is None else f"{name}:{gguf_file}")

        async def events() -> AsyncIterator[str]:
            yield f"data: {json.dumps({'status': 'ready', 'model': self.name, 'cached': True})}\n\n"

        return events()

    def shutdown(self) -> None:
        """Called when the server ends: the model belongs to whoever started it."""
