"""Tokenizers, chat templates and ends of text from GGUF metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from ktransformers.checkpoints.gguf import open_gguf
from ktransformers.checkpoints.gguf.pretokenizers import PRE_TOKENIZERS, pre_tokenizer
from ktransformers.checkpoints.gguf.tokenizer import end_tokens, load_gguf_tokenizer
from ktransformers.errors import CheckpointError
from tests.checkpoints.gguf.writer import Wish, write_gguf
from tests.models import EOS, make_byte_tokenizer, make_llama_dense

TEXT = "Hello, wörld! 12345 it's\n\n  fine… 東京タワー\t🙂 A1b2"


def written(path: Path, **metadata: Any) -> Path:
    write_gguf(make_llama_dense(num_hidden_layers=1), path, Wish(metadata=metadata))
    return path


def tokenizer_of(path: Path) -> PreTrainedTokenizerBase:
    tokenizer = load_gguf_tokenizer(open_gguf([path]))
    assert tokenizer is not None
    return tokenizer


def test_ids_text_special_tokens_and_template_are_those_of_the_original(tmp_path: Path) -> None:
    original, read = make_byte_tokenizer(), tokenizer_of(written(tmp_path / "model.gguf"))
    assert read.encode(TEXT) == original.encode(TEXT)
    assert read.decode(read.encode(TEXT)) == TEXT
    assert read.encode("<bos>a<eos>") == original.encode("<bos>a<eos>")
    assert (read.bos_token, read.eos_token, read.pad_token) == ("<bos>", "<eos>", "<pad>")
    chat = read.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "[user]hi[assistant]"


def test_special_tokens_outside_the_byte_alphabet_keep_their_ids(tmp_path: Path) -> None:
    tokens = [
        *make_byte_tokenizer().convert_ids_to_tokens(list(range(256))),
        "<pad>",
        "<｜begin▁of▁sentence｜>",
        "<eos>",
    ]
    read = tokenizer_of(written(tmp_path / "model.gguf", **{"tokenizer.ggml.tokens": tokens}))
    assert read.bos_token_id == 257
    assert read.encode("<｜begin▁of▁sentence｜>a") == [257, ord("a")]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_all_of_the_text(name: str) -> None:
    pieces = pre_tokenizer(name).pre_tokenize_str(TEXT)
    plain = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(TEXT)
    assert "".join(piece for piece, _ in pieces) == "".join(piece for piece, _ in plain)


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-2", ["it", "'s", "Ġ1234", "Ġ", "Ġok"]),
        ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "Ġok"]),
        ("llama-bpe", ["it", "'s", "Ġ", "123", "4", "Ġ", "Ġok"]),
        ("glm4", ["it", "'s", "Ġ", "123", "4", "Ġ", "Ġok"]),
        ("qwen2", ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "Ġok"]),
        ("deepseek-llm", ["it", "'", "s", "Ġ", "1", "2", "3", "4", "Ġ", "Ġok"]),
        ("deepseek-v3", ["it", "'s", "Ġ", "123", "4", "Ġ", "Ġok"]),
        ("kimi-k2", ["it's", "Ġ", "123", "4", "Ġ", "Ġok"]),
        ("gpt-4o", ["it's", "Ġ", "123", "4", "Ġ", "Ġok"]),
    ],
)
def test_text_is_cut_as_each_family_cuts_it(name: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in pre_tokenizer(name).pre_tokenize_str("it's 1234  ok")] == pieces


def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", **{"tokenizer.ggml.pre": "brand-new"})
    with pytest.raises(CheckpointError, match=r"'brand-new' is not known.*qwen2"):
        tokenizer_of(path)


def test_a_special_token_beyond_the_vocabulary_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", **{"tokenizer.ggml.eos_token_id": 9999})
    with pytest.raises(CheckpointError, match="259 tokens, and a special one is number 9999"):
        tokenizer_of(path)


def test_a_file_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    write_gguf(make_llama_dense(num_hidden_layers=1), tmp_path / "model.gguf", Wish(vocabulary=False))
    assert load_gguf_tokenizer(open_gguf([tmp_path / "model.gguf"])) is None


def test_all_tokens_that_end_a_turn_are_found(tmp_path: Path) -> None:
    tokens = [*make_byte_tokenizer().convert_ids_to_tokens(list(range(256))), "<|endoftext|>", "<|im_end|>", "<eos>"]
    path = written(tmp_path / "model.gguf", **{"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eot_token_id": 5})
    assert end_tokens(open_gguf([path])) == [EOS, 5, 257, 256]


def test_sentencepiece_vocabularies_get_their_beginning_and_spaces(tmp_path: Path) -> None:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, "▁", "h", "i", "hi", "▁hi"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 5]
    scores = [0.0] * 259 + [-5.0, -4.0, -3.0, -2.0, -1.0]
    said = {"model": "llama", "pre": "default", "tokens": tokens, "token_type": kinds, "scores": scores}
    special = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "padding_token_id": None}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in {**said, **special}.items()}
    model = make_llama_dense(num_hidden_layers=1, vocab_size=len(tokens))
    write_gguf(model, tmp_path / "model.gguf", Wish(metadata={**metadata, "tokenizer.ggml.add_bos_token": None}))
    read = tokenizer_of(tmp_path / "model.gguf")
    assert read.encode("hi hi") == [1, 263, 263]
    assert read.decode([263, 263], skip_special_tokens=True).strip() == "hi hi"
    assert read.encode("é") == [1, 259, 3 + 0xC3, 3 + 0xA9]


def test_byte_level_is_what_the_library_calls_it() -> None:
    assert isinstance(pre_tokenizer("default"), pre_tokenizers.ByteLevel)
