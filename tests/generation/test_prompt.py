"""Prompts: plain text as it is, conversations through the model's own template, clear words when there is none."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from ktransformers.generation import encode
from tests.models import make_byte_tokenizer

CPU = torch.device("cpu")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _make_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_text_is_encoded_as_it_is() -> None:
    inputs = encode(_make_tokenizer(TEMPLATE), "hé", chat=False, device=CPU)
    assert inputs["input_ids"].tolist() == [list("hé".encode())]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1]]


def test_messages_go_through_the_template_unchanged() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "user", "content": "v"}]
    inputs = encode(_make_tokenizer(TEMPLATE), messages, chat=False, device=CPU)
    assert bytes(inputs["input_ids"][0].tolist()).decode() == "<system>s<user>u<user>v<assistant>"


def test_a_string_as_chat_is_one_user_message() -> None:
    inputs = encode(_make_tokenizer(TEMPLATE), "u", chat=True, device=CPU)
    assert bytes(inputs["input_ids"][0].tolist()).decode() == "<user>u<assistant>"


@pytest.mark.parametrize("prompt", ["u", [{"role": "user", "content": "u"}]])
def test_a_chat_without_a_template_says_what_to_do(prompt: object) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        encode(_make_tokenizer(), prompt, chat=True, device=CPU)  # type: ignore[arg-type]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        encode(_make_tokenizer(), "", chat=False, device=CPU)


@pytest.mark.parametrize(
    ("prompt", "told"),
    [(None, "NoneType"), (7, "int"), ({"role": "user", "content": "u"}, "dict"), (["a", "b"], "str in a list")],
)
def test_what_is_neither_text_nor_a_conversation_is_told_what_is_accepted(prompt: object, told: str) -> None:
    with pytest.raises(TypeError, match=f"one text, or one conversation as a list of messages .* this is a {told}$"):
        encode(_make_tokenizer(TEMPLATE), prompt, chat=False, device=CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["caf\udce9", [{"role": "user", "content": "caf\udce9"}]])
def test_a_lone_surrogate_is_no_text(prompt: object) -> None:
    with pytest.raises(ValueError, match=r"no valid text: its character 4 .* UTF-8"):
        encode(_make_tokenizer(TEMPLATE), prompt, chat=False, device=CPU)  # type: ignore[arg-type]
