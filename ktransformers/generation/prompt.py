"""From a prompt, plain or a conversation, to token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedTokenizerBase

__all__ = ["Message", "Prompt", "encode"]

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[Message]

_SURROGATE = re.compile("[\ud800-\udfff]")  # Python puts them where bytes could not be decoded


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *, chat: bool, device: torch.device, **template: Any
) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, each (1, tokens), on `device`.

    A list of messages, or a string with `chat=True`, goes through the tokenizer's chat template, as one user message in
    the second case, with `template` as further variables. Raises `TypeError` for a prompt that is neither, and
    `ValueError` for a tokenizer without a template, a text that is no Unicode, and a prompt without any tokens.
    """
    _refuse(prompt)
    if isinstance(prompt, str) and not chat:
        encoded = tokenizer(prompt, return_tensors="pt")
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if not tokenizer.chat_template:
            raise ValueError(
                "this model's tokenizer has no chat template: give the prompt as plain text, or set "
                "tokenizer.chat_template"
            )
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **template
        )
    if encoded["input_ids"].shape[-1] == 0:
        raise ValueError("the prompt is empty, and this tokenizer puts no token in front: there is nothing to continue")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def _refuse(prompt: object) -> None:
    """Raises for what no tokenizer can take."""
    if not isinstance(prompt, str):
        wrong = [prompt] if isinstance(prompt, Mapping) or not isinstance(prompt, Sequence) else list(prompt)
        wrong = [part for part in wrong if part is prompt or not isinstance(part, Mapping)]
        if wrong:
            within = "" if wrong[0] is prompt else " in a list"
            raise TypeError(
                "a prompt is one text, or one conversation as a list of messages (dictionaries with role and content); "
                f"this is a {type(wrong[0]).__name__}{within}"
            )
    texts = [prompt] if isinstance(prompt, str) else [m.get("content") for m in prompt]  # type: ignore[attr-defined]
    for text in texts:
        if isinstance(text, str) and (broken := _SURROGATE.search(text)):
            raise ValueError(
                f"the prompt is no valid text: its character {broken.start() + 1} is half of a pair or a byte that was "
                "not UTF-8. A prompt is Unicode text, read from UTF-8"
            )
