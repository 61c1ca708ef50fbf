"""Chat templates: missing, refusing, with tools and with reasoning."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from ktransformers.server.served import ServedModel
from tests.server.conftest import NAME, Running, Script, running

QWEN = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% if reasoning_effort %}effort: {{ reasoning_effort }}\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant{{ '\n' }}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}

Templated = Callable[[str | None], Any]


@pytest.fixture
def templated(served: ServedModel) -> Templated:
    """`with templated(template) as server:` serves the model with that chat template."""

    @contextmanager
    def serve(template: str | None) -> Iterator[Running]:
        tokenizer = copy.deepcopy(served.tokenizer)
        tokenizer.chat_template = template
        with running(ServedModel(NAME, served.model, tokenizer, context=served.context)) as server:
            yield server

    return serve


def _answer(server: Running, stream: bool, **fields: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """Text, reasoning, tool calls and finish reason."""
    answer = server.chat(max_tokens=80, stream=stream, **fields)
    parts = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    said = [part.delta if stream else part.message for part in parts]
    calls = [(call.function.name, call.function.arguments) for part in said for call in part.tool_calls or []]
    text = "".join(part.content or "" for part in said)
    reasoning = "".join(getattr(part, "reasoning_content", None) or "" for part in said)
    return text, reasoning, calls, parts[-1].finish_reason


def test_without_a_template_completions_work_and_chat_says_what_to_do(templated: Templated) -> None:
    with templated(None) as server:
        assert server.post({"prompt": "x", "max_tokens": 1}, "/v1/completions").status == 200
        with pytest.raises(openai.BadRequestError, match="--chat-template FILE") as caught:
            server.chat()
        assert caught.value.code == "no_chat_template"


def test_a_template_that_refuses_the_messages_is_quoted(templated: Templated) -> None:
    refusing = "{% if messages[0].role != 'user' %}{{ raise_exception('start with the user') }}{% endif %}x"
    with templated(refusing) as server, pytest.raises(openai.BadRequestError, match="start with the user"):
        server.chat(messages=[{"role": "system", "content": "x"}])


def test_a_template_that_breaks_on_the_messages_is_no_broken_server(templated: Templated) -> None:
    with templated("{{ messages[5].content.upper() }}x") as server:
        reply = server.post({"messages": [{"role": "user", "content": "x"}]})
        assert (reply.status, reply.error["param"]) == (400, "messages")


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_come_apart_from_the_text(templated: Templated, script: Script, stream: bool) -> None:
    written = 'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    with templated(QWEN) as server, script(written):
        answer = _answer(server, stream, tools=[TOOL])
    assert answer == ("Let me see.", "", [("weather", '{"city": "Rome"}')], "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_comes_apart_from_the_text(templated: Templated, script: Script, stream: bool) -> None:
    with templated(QWEN) as server, script("<think>one and one</think>two"):
        assert _answer(server, stream) == ("two", "one and one", [], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_cut_by_the_limit_is_left_out(templated: Templated, script: Script, stream: bool) -> None:
    text = 'See.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome and also '
    with templated(QWEN) as server, script(text + "on and on " * 20):
        assert _answer(server, stream, tools=[TOOL]) == ("See.", "", [], "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_that_is_no_json_is_an_error_of_this_request(
    templated: Templated, script: Script, stream: bool
) -> None:
    with templated(QWEN) as server, script("<tool_call>\n{weather: Rome}\n</tool_call>"):
        with pytest.raises(openai.APIError, match="response template"):
            _answer(server, stream, tools=[TOOL])
        assert server.chat(max_tokens=1).usage.completion_tokens == 1


def _prompt_tokens(server: Running, text: str) -> int:
    return len(server.served.tokenizer.encode(text))


def test_tools_and_effort_reach_the_template_and_tool_choice_none_hides_tools(templated: Templated) -> None:
    with templated(QWEN) as server:
        plain = server.chat(max_tokens=1).usage.prompt_tokens
        with_tools = server.chat(max_tokens=1, tools=[TOOL]).usage.prompt_tokens
        hidden = server.chat(max_tokens=1, tools=[TOOL], tool_choice="none").usage.prompt_tokens
        effort = server.chat(max_tokens=1, reasoning_effort="high").usage.prompt_tokens
        assert with_tools > plain
        assert hidden == plain
        assert effort == plain + _prompt_tokens(server, "effort: high\n")


def test_earlier_tool_calls_reach_the_template_with_their_arguments(templated: Templated) -> None:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    call = {"id": "1", "type": "function", "function": function}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    expected = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nweather(Rome)<|im_end|>\n<|im_start|>assistant\n"
    with templated(QWEN) as server:
        answer = server.chat(messages=messages, max_tokens=1)
        assert answer.usage.prompt_tokens == _prompt_tokens(server, expected)
        function["arguments"] = "{city"
        reply = server.post({"messages": messages})
        assert reply.status == 400
        assert "not JSON" in reply.error["message"]


def test_variables_of_the_template_can_be_given(templated: Templated) -> None:
    with templated("{{ greeting }}{{ messages[0].content }}") as server:
        answer = server.chat("you", max_tokens=1, extra_body={"chat_template_kwargs": {"greeting": "Good morning "}})
        assert answer.usage.prompt_tokens == _prompt_tokens(server, "Good morning you")
