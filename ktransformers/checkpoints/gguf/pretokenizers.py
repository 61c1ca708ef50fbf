"""How byte-level vocabularies cut text before merges apply, by what files call it (`tokenizer.ggml.pre`).

The splits are those of the models' own tokenizers; src/llama-vocab.cpp of llama.cpp lists the names with equivalent
ones. transformers has a table of some.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

__all__ = ["PRE_TOKENIZERS", "pre_tokenizer"]

_LLAMA3: str = GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]
_CJK = "[一-龥\u0800-一가-\ud7ff]+"

# As GPT-2: the regular expression that the byte-level pre-tokenizer brings.
_GPT2 = (
    "gpt-2",
    "phi-2",
    "jina-es",
    "jina-de",
    "gigachat",
    "jais",
    "mpt",
    "olmo",
    "trillion",
    "roberta-bpe",
    "default",
)
# As GPT-2, each digit for itself.
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum")

_SPLITS: dict[str, tuple[str, ...]] = {
    **{name: (split,) for name, split in GGUF_PRE_TOKENIZER_SPLITS.items()},
    "glm4": (_LLAMA3,),
    "chatglm-bpe": (_LLAMA3,),
    "deepseek-llm": (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$",
        _CJK,
        r"\p{N}",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "kimi-k2": (
        r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}

PRE_TOKENIZERS = tuple(sorted({*_GPT2, *_DIGITS, *_SPLITS}))
"""The names that are read."""


def pre_tokenizer(name: str) -> Any:
    """The pre-tokenizer of that name. Raises `KeyError` for one that is not in `PRE_TOKENIZERS`."""
    if name in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _DIGITS:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        return pre_tokenizers.Sequence(steps)
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in _SPLITS[name]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
