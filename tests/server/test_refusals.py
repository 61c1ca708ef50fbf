"""Requests that cannot be answered: a status, the field and a sentence, and a server that goes on."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from ktransformers.server.connection import MOST_BYTES
from tests.server.conftest import JSON, NAME, Running, ask, running

GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


def _user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


# Fields of a request, the field that the error names, and words of its sentence.
_WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "hello"}, "messages", "list"),
    ({"messages": [{"content": "x"}]}, "messages.0.role", "required"),
    ({"messages": [{"role": "user"}]}, "messages", "missing or null"),
    (_user(None), "messages", "missing or null"),
    (_user(5), "messages.0.content", "string"),
    (_user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages.0.content", "image_url"),
    (_user("\ud800"), "messages", "no valid text"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": -5}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 1 << 40}, "max_tokens", "limit of prompt and answer together is 1024"),
    ({"max_tokens": 1025}, "max_tokens", "limit of prompt and answer together is 1024"),
    ({"max_tokens": "5"}, "max_tokens", "integer"),
    ({"max_tokens": True}, "max_tokens", "integer"),
    ({"max_token": 5}, "max_token", 'did you mean "max_tokens"?'),
    ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
    ({"temperature": float("nan")}, "temperature", "less than or equal"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"seed": "x"}, "seed", "integer"),
    ({"stop": [1]}, "stop.0", "string"),
    ({"stop": ""}, "stop.0", "at least 1 character"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown field"),
    ({"logit_bias": {"one": 1}}, "logit_bias", "no token id"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "no token id"),
    ({"n": 2}, "n", "one answer"),
    ({"n": 10**12}, "n", "one answer"),
    ({"logprobs": True}, "logprobs", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "free text"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "chat template"),
    ({"tool_choice": "required"}, "tool_choice", "'auto' or 'none'"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "chat template"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "no variable"),
    ({"generation_config": "{"}, "generation_config", "JSON"),
    ({"generation_config": '{"num_beams": 4}'}, "generation_config", "num_beams cannot be set"),
    ({"generation_config": '{"temperature": -4}'}, "temperature", "greater than or equal to 0"),
]


@pytest.mark.parametrize(("fields", "param", "words"), _WRONG, ids=[repr(case[0])[:60] for case in _WRONG])
def test_a_wrong_field_is_named(server: Running, fields: dict[str, Any], param: str, words: str) -> None:
    reply = server.post({**GOOD, **fields})
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"] == param
    assert words in reply.error["message"]


_WRONG_PROMPTS: list[tuple[Any, str]] = [
    (None, "one text, or one list of token ids"),
    (["a", "b"], "a request for each prompt"),
    ([], "one token id or more"),
    ([99999], "from 0 to 2047"),
    ([-1], "from 0 to 2047"),
    ("", "nothing to continue"),
]


@pytest.mark.parametrize(("prompt", "words"), _WRONG_PROMPTS)
def test_a_wrong_prompt_of_a_completion_is_refused(server: Running, prompt: Any, words: str) -> None:
    reply = server.post({"prompt": prompt}, "/v1/completions")
    assert (reply.status, reply.error["param"]) == (400, "prompt")
    assert words in reply.error["message"]


@pytest.mark.parametrize("field", ["echo", "best_of", "suffix", "logprobs"])
def test_what_completions_do_not_do_is_said(server: Running, field: str) -> None:
    reply = server.post({"prompt": "x", field: {"suffix": "s"}.get(field, 2)}, "/v1/completions")
    assert (reply.status, reply.error["param"]) == (400, field)


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b"7", b"null", b'"text"', b"\xff\xfe", b"{}", b'{"messages": [}'])
def test_a_body_that_is_no_request_is_refused(server: Running, body: bytes) -> None:
    reply = ask(server.url + "/v1/chat/completions", body, method="POST", headers=JSON)
    assert reply.status == 400
    assert reply.error["message"]


def test_a_body_of_another_type_is_told_which_one_is_needed(server: Running) -> None:
    reply = ask(
        server.url + "/v1/chat/completions",
        b"messages=x",
        headers={"content-type": "application/x-www-form-urlencoded"},
    )
    assert reply.status == 400
    assert "content-type: application/json" in reply.error["message"]


def test_a_body_beyond_all_measure_is_refused(server: Running) -> None:
    reply = server.post(_user("x" * MOST_BYTES))
    assert reply.status == 413
    assert str(MOST_BYTES) in reply.error["message"]


def test_a_prompt_longer_than_the_context_names_both_numbers(small: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        small.client.completions.create(model=NAME, prompt=[5] * 200, max_tokens=1)
    assert "200 tokens" in caught.value.message
    assert "64" in caught.value.message
    assert caught.value.code == "context_length_exceeded"
    assert small.post({"prompt": [5] * 64}, "/v1/completions").status == 400


def test_another_model_is_not_found_and_the_served_one_is_named(server: Running) -> None:
    with pytest.raises(openai.NotFoundError, match=NAME) as caught:
        server.client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "model_not_found"
    assert server.get("/v1/models/org/other").status == 404
    reply = server.post({"model": "org/other"}, "/load_model")
    assert (reply.status, reply.error["param"]) == (404, "model")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/audio/transcriptions", "/reset", "/v1/systemone", "/docs", "/"])
def test_a_path_that_is_not_there_is_told_those_that_are(server: Running, path: str) -> None:
    reply = server.post({}, path)
    assert reply.status == 404
    assert "/v1/chat/completions" in reply.error["message"]


def test_the_wrong_method_is_said(server: Running) -> None:
    reply = server.get("/v1/chat/completions")
    assert reply.status == 405
    assert "GET" in reply.error["message"]


def test_the_server_answers_after_all_that(server: Running) -> None:
    for fields, _, _ in _WRONG[:3]:
        server.post({**GOOD, **fields})
    assert server.chat(max_tokens=2).usage.completion_tokens == 2


def test_only_clients_with_the_key_are_answered(server: Running) -> None:
    with running(server.served, api_key="secret") as locked:
        assert locked.chat(max_tokens=1).usage.completion_tokens == 1
        wrong: list[dict[str, str]] = [{}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}]
        for headers in wrong:
            reply = locked.post(GOOD, **headers)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert locked.get("/health").status == 200


def test_browsers_are_let_in_only_when_asked_for(server: Running) -> None:
    preflight = {"origin": "http://page.example", "access-control-request-method": "POST"}
    refused = ask(server.url + "/v1/chat/completions", method="OPTIONS", headers=preflight)
    assert refused.status == 405
    with running(server.served, cors=True, api_key="secret") as opened:
        allowed = ask(opened.url + "/v1/chat/completions", method="OPTIONS", headers=preflight)
        assert allowed.status == 200
        assert allowed.headers["access-control-allow-origin"] == "*"
        assert opened.post(GOOD, origin="http://page.example").headers["access-control-allow-origin"] == "*"
