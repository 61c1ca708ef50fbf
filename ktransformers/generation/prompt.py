"""From a prompt, plain or a conversation, to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedTokenizerBase

__all__ = ["Message", "Prompt", "encode"]

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[Message]


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *, chat: bool, device: torch.device
) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, each (1, tokens), on `device`.

    A list of messages, or a string with `chat=True`, goes through the tokenizer's chat template, as one user message in
    the second case. Raises `ValueError` for a tokenizer without a template, and for a prompt without any tokens.
    """
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
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    if encoded["input_ids"].shape[-1] == 0:
        raise ValueError("the prompt is empty, and this tokenizer puts no token in front: there is nothing to continue")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}
