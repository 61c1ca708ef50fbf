"""Text given out piece by piece is the text decoded at once, whatever the tokenizer and wherever characters are cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ktransformers.generation.assembler import TextAssembler, decode
from tests.models import EOS, make_byte_tokenizer

BYTES = make_byte_tokenizer()


def _make_metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece models have it: a word's space belongs to its token, and a text's first space is stripped."""
    words = ["▁", "▁a", "▁bc", "x", "\n", "▁.", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    tokenizer = Tokenizer(BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


METASPACE = _make_metaspace_tokenizer()


def _pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    assembler = TextAssembler(tokenizer)
    return [*(assembler.push(token) for token in ids), assembler.finish()]


def test_text_arrives_before_the_character_after_it_is_complete() -> None:
    assert _pieces(BYTES, list("hi😀!".encode())) == ["h", "i", "", "", "", "😀", "!", ""]


def test_bytes_that_never_become_a_character_come_at_the_end() -> None:
    ids = [*b"ab", 0xF0, 0x9F]
    assert "".join(_pieces(BYTES, ids)) == decode(BYTES, ids)
    assert decode(BYTES, ids).startswith("ab\ufffd")


def test_special_tokens_are_not_text() -> None:
    assert _pieces(BYTES, [*b"ab", EOS]) == ["a", "b", "", ""]


def test_spaces_after_a_newline_survive_a_tokenizer_that_strips_the_first_one() -> None:
    ids = [1, 4, 2, 4, 0, 1]
    assert "".join(_pieces(METASPACE, ids)) == decode(METASPACE, ids) == "a\n bc\n  a"


def test_a_byte_that_spoils_the_bytes_before_it_is_waited_for() -> None:
    spoilt = [6, 7, 7, 7, 6]
    assert _pieces(METASPACE, spoilt) == ["", "", "", "", "", decode(METASPACE, spoilt)]
    assert _pieces(METASPACE, [3, 6, 7, 8, 9, 3]) == ["x", "", "", "", "", "😀x", ""]


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_text_of_bytes(text: str) -> None:
    assert "".join(_pieces(BYTES, list(text.encode()))) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 258), max_size=40))
def test_any_bytes_at_all(ids: list[int]) -> None:
    assert "".join(_pieces(BYTES, ids)) == decode(BYTES, ids)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=30))
def test_any_tokens_of_a_sentencepiece_kind(ids: list[int]) -> None:
    assert "".join(_pieces(METASPACE, ids)) == decode(METASPACE, ids)
