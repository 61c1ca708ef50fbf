"""Streams: equal to the plain text, honest about errors, and stopped when nobody reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ktransformers.generation import encode, generate_text, stream_text
from tests.models import make_byte_tokenizer, make_llama_dense

TOKENIZER = make_byte_tokenizer()
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_llama_dense(num_hidden_layers=1)


class _Forced(LogitsProcessor):
    """Makes the model write given bytes, then end; `at` is called with the step's number."""

    def __init__(self, text: str, at: Callable[[int], None] = lambda _: None) -> None:
        self._ids = [*text.encode(), TOKENIZER.eos_token_id]
        self._at = at
        self.steps = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        self._at(self.steps)
        token = self._ids[min(self.steps, len(self._ids) - 1)]
        self.steps += 1
        forced = torch.full_like(scores, -1e9)
        forced[:, token] = 0
        return forced


def _settings(forced: _Forced, **kwargs: Any) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList([forced]), "do_sample": False, "max_new_tokens": 64, **kwargs}


def _inputs(prompt: str = "say") -> dict[str, torch.Tensor]:
    return encode(TOKENIZER, prompt, chat=False, device=CPU)


@pytest.mark.parametrize("text", ["plain", "hi😀 and ∑ and 漢字", "two\n  lines\n", ""])
def test_the_stream_is_the_plain_text(model: PreTrainedModel, text: str) -> None:
    plain = generate_text(model, TOKENIZER, _inputs(), **_settings(_Forced(text)))
    pieces = list(stream_text(model, TOKENIZER, _inputs(), **_settings(_Forced(text))))
    assert "".join(pieces) == plain == text
    assert "" not in pieces


def test_a_limit_in_the_middle_of_a_character_is_the_same_both_ways(model: PreTrainedModel) -> None:
    limit = {"max_new_tokens": 4}
    plain = generate_text(model, TOKENIZER, _inputs(), **_settings(_Forced("hi😀"), **limit))
    assert "".join(stream_text(model, TOKENIZER, _inputs(), **_settings(_Forced("hi😀"), **limit))) == plain
    assert plain.startswith("hi\ufffd")


def test_pieces_arrive_while_the_text_is_written(model: PreTrainedModel) -> None:
    read = threading.Event()

    def wait(step: int) -> None:
        if step == 3:  # "ab" is out; "c" is not written before "ab" was read
            assert read.wait(60)

    stream = stream_text(model, TOKENIZER, _inputs(), **_settings(_Forced("abcd", wait)))
    assert [next(stream), next(stream)] == ["a", "b"]
    read.set()
    assert "".join(stream) == "cd"


def test_an_error_while_generating_reaches_the_reader(model: PreTrainedModel) -> None:
    def fail(step: int) -> None:
        if step == 2:
            raise ArithmeticError("at the third token")

    stream = stream_text(model, TOKENIZER, _inputs(), **_settings(_Forced("abcd", fail)))
    with pytest.raises(ArithmeticError, match="at the third token"):
        list(stream)


def test_a_wrong_argument_reaches_the_reader(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"num_beams|streamer"):
        list(stream_text(model, TOKENIZER, _inputs(), **_settings(_Forced("a"), num_beams=2)))


@pytest.mark.parametrize("leave", ["close", "drop", "raise"])
def test_an_abandoned_stream_stops_the_work(model: PreTrainedModel, leave: str) -> None:
    forced = _Forced("x" * 400)
    stream = stream_text(model, TOKENIZER, _inputs(), **_settings(forced, max_new_tokens=400))
    assert next(stream) == "x"
    if leave == "close":
        stream.close()  # type: ignore[attr-defined]
    elif leave == "drop":
        del stream
    else:
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert forced.steps < 400
    assert not [thread for thread in threading.enumerate() if thread.name == "ktransformers-generate"]


def test_a_stream_nobody_started_starts_no_work(model: PreTrainedModel) -> None:
    forced = _Forced("abc")
    stream_text(model, TOKENIZER, _inputs(), **_settings(forced))
    assert forced.steps == 0


def test_stop_strings_work_without_passing_the_tokenizer(model: PreTrainedModel) -> None:
    forced = _Forced("alpha beta gamma")
    assert generate_text(model, TOKENIZER, _inputs(), **_settings(forced, stop_strings=["ta"])) == "alpha beta"


def test_all_end_tokens_of_the_model_stay_active(model: PreTrainedModel) -> None:
    ends = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [ends, ord("!")]
    try:
        assert generate_text(model, TOKENIZER, _inputs(), **_settings(_Forced("ab!cd"))) == "ab!"
    finally:
        model.generation_config.eos_token_id = ends


def test_a_model_without_a_padding_token_warns_of_nothing(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.generation_config, "pad_token_id", None)
    generate_text(model, TOKENIZER, _inputs(), **_settings(_Forced("ab")))
    assert not caplog.records


@pytest.mark.parametrize("options", [{"max_length": 6}, {"num_return_sequences": 2}, {"return_dict_in_generate": True}])
@pytest.mark.parametrize("run", [generate_text, stream_text])
def test_arguments_that_make_no_one_text_are_refused_at_the_call(
    model: PreTrainedModel, run: Callable[..., object], options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(options))}=.* cannot be had here: "):
        run(model, TOKENIZER, _inputs(), max_new_tokens=2, **options)


def test_arguments_that_ask_for_one_text_are_not_refused(model: PreTrainedModel) -> None:
    one = {"num_return_sequences": 1, "return_dict_in_generate": False, "max_length": None, "streamer": None}
    assert "".join(stream_text(model, TOKENIZER, _inputs(), **_settings(_Forced("hi"), **one))) == "hi"


def test_a_stream_takes_no_streamer_of_somebody_else(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="a stream has a streamer of its own"):
        stream_text(model, TOKENIZER, _inputs(), streamer=object())
