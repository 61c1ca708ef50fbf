"""The tokenizer that a GGUF file describes."""

from __future__ import annotations

import importlib
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ktransformers.checkpoints.gguf.checkpoint import GgufCheckpoint
from ktransformers.checkpoints.gguf.pretokenizers import PRE_TOKENIZERS, pre_tokenizer
from ktransformers.errors import CheckpointError
from ktransformers.log import get_logger

__all__ = ["end_tokens", "load_gguf_tokenizer"]

log = get_logger("checkpoints")

_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Vocabularies whose tokens apply before merges do, as their tokenizer.json says.
_WHOLE_TOKENS_FIRST = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")
# Control tokens that end a turn. A file names one token as the end of text; chats may end with another.
_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|user|>",
    "<|observation|>",
    "<|return|>",
    "<|call|>",
)


def load_gguf_tokenizer(checkpoint: GgufCheckpoint) -> PreTrainedTokenizerBase | None:
    """Tokenizer with special tokens and chat template, or None for a file without a vocabulary.

    Raises `CheckpointError` for a vocabulary that is damaged or of a kind that is not known.
    """
    said = {key.removeprefix("tokenizer."): value for key, value in checkpoint.metadata.items()}
    tokens, kind = said.get("ggml.tokens"), said.get("ggml.model", "none")
    if not tokens or kind in ("none", "no_vocab"):
        log.info("%s has no vocabulary: text can neither be read nor written, token ids can", checkpoint.name)
        return None
    try:
        backend = _byte_level(said) if kind == "gpt2" else _by_transformers(checkpoint.architecture, said)
        special = {name: _text(tokens, said.get(f"ggml.{key}_token_id")) for name, key in _SPECIAL.items()}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            chat_template=said.get("chat_template"),
            # llama.cpp adds it to SentencePiece vocabularies that do not say otherwise.
            add_bos_token=bool(said.get("ggml.add_bos_token", kind == "llama")),
            add_eos_token=bool(said.get("ggml.add_eos_token", False)),
            model_max_length=checkpoint.metadata.get(f"{checkpoint.architecture}.context_length", 1 << 30),
            clean_up_tokenization_spaces=False,
            **special,
        )
    except CheckpointError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise CheckpointError(f"the tokenizer of {checkpoint.name} cannot be built: {error}") from error
    for name, text in special.items():
        wanted = said[f"ggml.{_SPECIAL[name]}_token_id"] if text is not None else None
        if text is not None and tokens[tokenizer.convert_tokens_to_ids(text)] != tokens[wanted]:
            raise CheckpointError(f"the vocabulary of {checkpoint.name} has no place for its {name} {text!r}")
    return tokenizer


def end_tokens(checkpoint: GgufCheckpoint) -> list[int]:
    """The ids of all tokens that end a text or a turn, the file's own first."""
    metadata = checkpoint.metadata
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens, kinds = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    control = {token: place for place, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == _CONTROL}
    # In gpt-oss, which has a <|return|>, <|end|> ends a message and not the turn.
    ends = _ENDS if "<|return|>" in control else (*_ENDS, "<|end|>")
    return list(dict.fromkeys([*(n for n in named if n is not None), *(control[t] for t in ends if t in control)]))


def _byte_level(said: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE. Ordinary tokens are spelt in the byte alphabet; control and user-defined ones as they are."""
    name = said.get("ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"the vocabulary's pre-tokenizer {name!r} is not known, and another would cut text differently from what "
            f"the model has learnt; known: {', '.join(PRE_TOKENIZERS)}"
        )
    tokens, kinds = said["ggml.tokens"], said.get("ggml.token_type", [])
    merges = [(merge[: merge.index(" ", 1)], merge[merge.index(" ", 1) + 1 :]) for merge in said.get("ggml.merges", [])]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=name in _WHOLE_TOKENS_FIRST))
    tokenizer.pre_tokenizer = pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _by_transformers(architecture: str, said: dict[str, Any]) -> Tokenizer:
    names = {"ggml.model": "tokenizer_type", "ggml.pre": "pre_tokenizer_type"}
    described = {names.get(key, key.removeprefix("ggml.")): value for key, value in said.items()}
    described["add_prefix_space"] = said.get("ggml.add_space_prefix", True)
    tokenizer: Tokenizer = _converter()(architecture, described)[0]
    return tokenizer


def _converter() -> Any:
    """transformers' builders of tokenizers; they moved in 5.2x."""
    try:
        return importlib.import_module("transformers.integrations.gguf").convert_gguf_tokenizer
    except ImportError:
        return importlib.import_module("transformers.integrations.ggml").convert_gguf_tokenizer


def _text(tokens: list[str], place: int | None) -> str | None:
    if place is None:
        return None
    if not 0 <= place < len(tokens):
        raise CheckpointError(f"the vocabulary has {len(tokens)} tokens, and a special one is number {place}")
    return tokens[place]
