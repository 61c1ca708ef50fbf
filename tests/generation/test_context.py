"""Prompts that are longer than the model's context are said to be, with numbers."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from ktransformers.generation import warn_beyond_context
from tests.models import make_qwen3_moe


@pytest.mark.parametrize(
    ("prompt", "new", "said"),
    [
        (40, 10, "the prompt has 40 tokens and the model's context is 32: 8 of them lie beyond its context"),
        (30, 10, "context is 32: after 2 of the up to 10 new ones its context is full"),
        (22, 10, None),
    ],
)
def test_what_lies_beyond_the_context_is_said(
    caplog: pytest.LogCaptureFixture, prompt: int, new: int, said: str | None
) -> None:
    model = make_qwen3_moe(max_position_embeddings=32)
    with caplog.at_level(logging.WARNING, "ktransformers"):
        warn_beyond_context(model, prompt, new)
    assert (said in caplog.text) if said else not caplog.records


def test_a_model_without_a_limit_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=SimpleNamespace))
    with caplog.at_level(logging.WARNING, "ktransformers"):
        warn_beyond_context(model, 10**6, 1)
    assert not caplog.records
