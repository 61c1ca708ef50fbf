"""Stop strings and characters: what a stream may show, and when."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktransformers.server.stops import StopFilter
from tests.server.conftest import Running, Script

_TEXT = st.text(alphabet="ab ", max_size=24)


@given(text=_TEXT, stops=st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), max_size=3), data=st.data())
def test_any_cut_of_a_text_gives_what_stands_before_the_first_stop(text: str, stops: list[str], data: Any) -> None:
    found = StopFilter(stops)
    # The first stop is the one that is complete first.
    places = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    expected = text[: min(places)[1]] if places else text
    shown, rest = "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        shown += found.push(rest[:size])
        rest = rest[size:]
        assert expected.startswith(shown)
    assert shown + found.finish() == expected
    assert found.found == bool(places)


def test_no_more_is_held_back_than_may_become_a_stop() -> None:
    found = StopFilter(["please wait"])
    assert found.push("say pl") == "say "
    assert found.push("um") == "plum"
    assert found.push(" pleas") == " "
    assert found.finish() == "pleas"


def _answer(server: Running, stream: bool, **fields: Any) -> tuple[str, str]:
    answer = server.chat(stream=stream, max_tokens=60, **fields)
    if not stream:
        return answer.choices[0].message.content, answer.choices[0].finish_reason
    chunks = list(answer)
    return "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_is_never_shown(server: Running, script: Script, stream: bool) -> None:
    with script("alpha beta gamma delta"):
        assert _answer(server, stream, stop=["ta gam"]) == ("alpha be", "stop")
    with script("alpha beta gamma delta"):
        assert _answer(server, stream, stop="zzz") == ("alpha beta gamma delta", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_text_held_back_for_a_stop_is_delivered_at_the_end(server: Running, script: Script, stream: bool) -> None:
    with script("pleas"):
        assert _answer(server, stream, stop=["please wait"]) == ("pleas", "stop")


def test_generation_ends_at_the_stop_and_not_after_it(server: Running, script: Script) -> None:
    upto = len(server.served.tokenizer.encode("one two"))
    with script("one two three four five six"):
        usage = server.chat(max_tokens=60, stop=[" two"]).usage
    assert usage.completion_tokens == upto


def test_the_model_s_own_end_tokens_stay_when_there_are_stops(
    server: Running, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    comma = server.served.tokenizer.encode(",")[0]
    config = server.served.model.generation_config
    monkeypatch.setattr(config, "eos_token_id", [server.served.tokenizer.eos_token_id, comma])
    with script("first, second", end=False):
        answer = server.chat(max_tokens=60, stop=["zzz"])
    # The comma ends the text here and is no special token: it must not show.
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("first", "stop")


def test_a_character_of_many_tokens_comes_whole_and_the_text_before_it_at_once(server: Running, script: Script) -> None:
    text = "hi 😀 né ☃"
    assert len(server.served.tokenizer.encode("😀")) > 1
    with script(text):
        pieces = [c.choices[0].delta.content or "" for c in server.chat(max_tokens=60, stream=True)]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    whole = next(piece for piece in pieces if "😀" in piece)
    assert "hi" not in whole


def test_a_character_cut_off_by_the_limit_is_the_same_plain_and_streamed(server: Running, script: Script) -> None:
    with script("😀"):
        plain = server.chat(max_tokens=1).choices[0].message.content
    with script("😀"):
        chunks = list(server.chat(max_tokens=1, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == plain == "\ufffd"
