"""How byte-level vocabularies cut text before merges apply, by what files call it (`tokenizer.ggml.pre`).

The splits are those of the models' own tokenizers (tokenizer.json); src/llama-vocab.cpp of llama.cpp lists the names
with equivalent ones.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, pre_tokenizers

__all__ = ["PRE_TOKENIZERS", "pre_tokenizer"]

# Parts that most of them are made of.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_OF_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(ending: str = "", without: str = "") -> str:
    """Words that begin with capitals or go on in small letters; `without`: letters that are left to others."""
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}" + without + "]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}" + without + "]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return f"{lead}{upper}*{lower}+{ending}|{lead}{upper}+{lower}*{ending}"


def _either(*parts: str) -> tuple[str]:
    return ("|".join(parts),)


_LLAMA3 = _either(_CONTRACTIONS, _LETTERS, r"\p{N}{1,3}", _SIGNS, _SPACES)
_QWEN2 = _either(_CONTRACTIONS, _LETTERS, r"\p{N}", _SIGNS, _SPACES)
_QWEN35 = _either(
    _CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES
)
_TEKKEN = _either(_words(), r"\p{N}", _SIGNS_OF_PATHS, _SPACES)
_GPT4O = _either(_words(f"{_CONTRACTIONS}?"), r"\p{N}{1,3}", _SIGNS_OF_PATHS, _SPACES)
_KIMI = _either(r"[\p{Han}]+", _words(f"{_CONTRACTIONS}?", r"&&[^\p{Han}]"), r"\p{N}{1,3}", _SIGNS, _SPACES)
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
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("lfm2", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
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
    "kimi-k2": _KIMI,
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
