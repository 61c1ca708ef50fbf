"""Many clients, clients that leave, and failures inside the model."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch

from ktransformers.server.engine import Engine
from ktransformers.server.errors import ApiError
from tests.server.conftest import Running, Script, running

LONG = {"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 900}


def _wait_until(true: Callable[[], bool]) -> None:
    """Returns as soon as it is so; a test that waits for what never comes fails after a minute."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _send(server: Running, body: dict[str, Any]) -> socket.socket:
    """Sends a request and leaves the connection open, unread."""
    address = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((address[0], int(address[1])), timeout=60)
    text = json.dumps(body).encode()
    headers = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{headers}".encode() + text)
    return connection


def _idle(server: Running) -> bool:
    return server.engine.running == 0 and server.engine.waiting == 0


@pytest.mark.parametrize("clients", [2, 8])
def test_clients_at_once_get_what_each_would_get_alone(server: Running, clients: int) -> None:
    prompts = [f"The {word}" for word in ("king", "house", "sea", "old man", "child", "road", "night", "letter")]

    def ask(prompt: str) -> str:
        stream = server.chat(prompt, max_tokens=16, temperature=0, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    alone = [ask(prompt) for prompt in prompts[:clients]]
    with ThreadPoolExecutor(clients) as pool:
        assert list(pool.map(ask, prompts[:clients])) == alone


@pytest.mark.parametrize("stream", [False, True])
def test_generation_stops_when_its_client_leaves(server: Running, script: Script, stream: bool) -> None:
    steps: list[int] = []
    with script(" and", end=False, at={n: lambda: steps.append(1) for n in range(900)}):
        connection = _send(server, {**LONG, "stream": stream})
        _wait_until(lambda: len(steps) > 2)
        connection.close()
        _wait_until(lambda: _idle(server))
    assert len(steps) < 900
    assert server.chat(max_tokens=2).usage.completion_tokens == 2


def test_requests_whose_clients_left_the_queue_are_not_computed(server: Running, script: Script) -> None:
    starts: list[int] = []
    hook = server.served.model.register_forward_pre_hook(
        lambda _, __, given: starts.append(1) if given["input_ids"].shape[1] > 1 else None, with_kwargs=True
    )
    with script(" and", end=False):
        first = _send(server, {**LONG, "stream": True})
        _wait_until(lambda: server.engine.running == 1)
        queued = [_send(server, LONG) for _ in range(3)]
        _wait_until(lambda: server.engine.waiting == 3)
        assert server.get("/health").json()["waiting"] == 3
        for connection in queued:
            connection.close()
        _wait_until(lambda: server.engine.waiting == 0)
        first.close()
        assert server.chat(max_tokens=2).usage.completion_tokens == 2
    hook.remove()
    assert len(starts) == 2


def test_a_crowd_of_disconnects_leaves_the_server_as_it_was(server: Running) -> None:
    for _ in range(25):
        _send(server, {**LONG, "stream": True}).close()
        _send(server, LONG).close()
    _wait_until(lambda: _idle(server))
    assert server.chat(max_tokens=2).usage.completion_tokens == 2


def test_a_client_that_leaves_during_the_prefill_stops_it_between_two_layers(server: Running) -> None:
    layers: list[int] = []
    left = threading.Event()

    def enter(index: int) -> Callable[..., None]:
        def note(*_: Any) -> None:
            layers.append(index)
            if index == 1:  # the client leaves while this layer is computed
                connection.close()
                left.wait(30)

        return note

    experts = [layer.mlp.experts for layer in server.served.model.model.layers]
    hooks = [module.register_forward_hook(enter(index)) for index, module in enumerate(experts)]
    connection = _send(server, LONG)
    _wait_until(lambda: 1 in layers)
    (job,) = [server.engine._running]
    _wait_until(lambda: job is not None and job.cancelled)
    left.set()
    _wait_until(lambda: _idle(server))
    for hook in hooks:
        hook.remove()
    assert layers == [0, 1]


def test_a_full_queue_says_when_to_come_again(server: Running, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.engine, "_most_waiting", 1)
    with script(" and", end=False):
        connections = [_send(server, LONG)]
        _wait_until(lambda: server.engine.running == 1)
        connections.append(_send(server, LONG))
        _wait_until(lambda: server.engine.waiting == 1)
        reply = server.post(LONG)
        assert (reply.status, reply.error["code"]) == (503, "queue_full")
        assert int(reply.headers["retry-after"]) > 0
        for connection in connections:
            connection.close()
        _wait_until(lambda: _idle(server))


def _fail() -> None:
    raise RuntimeError('boom\n"quoted"')


def test_a_failure_in_the_middle_of_a_stream_is_its_last_event(server: Running, script: Script) -> None:
    with script("alpha beta gamma", at={3: _fail}):
        stream = server.chat(max_tokens=30, stream=True)
        with pytest.raises(openai.APIError, match="boom"):
            list(stream)
    with script("alpha beta gamma", at={3: _fail}):
        raw = server.post({**LONG, "stream": True})
    assert raw.status == 200
    last = json.loads(raw.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["type"] == "server_error"
    assert server.chat(max_tokens=2).usage.completion_tokens == 2


def test_a_failure_before_a_plain_answer_is_a_500_with_its_words(server: Running, script: Script) -> None:
    with script("alpha beta gamma", at={3: _fail}):
        reply = server.post(LONG)
    assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert "boom" in reply.error["message"]
    assert server.chat(max_tokens=2).usage.completion_tokens == 2


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_no_numbers_fail_one_request(server: Running, temperature: int) -> None:
    hook = server.served.model.lm_head.register_forward_hook(lambda _, __, logits: logits * torch.nan)
    reply = server.post({**LONG, "temperature": temperature})
    hook.remove()
    assert reply.status == 500
    assert "NaN" in reply.error["message"]
    assert server.chat(max_tokens=2).usage.completion_tokens == 2


def test_an_engine_that_ends_tells_those_who_wait(server: Running, script: Script) -> None:
    with script(" and", end=False), running(server.served) as ending, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ending.post, LONG) for _ in range(2)]
        _wait_until(lambda: ending.engine.running == 1 and ending.engine.waiting == 1)
        ending.engine.abort()
        for answer in answers:
            assert (answer.result().status, answer.result().error["code"]) == (503, "shutting_down")
        assert ending.post(LONG).status == 503


def test_no_hook_stays_on_the_model(server: Running) -> None:
    experts = server.served.model.model.layers[0].mlp.experts
    before = len(experts._forward_pre_hooks)
    engine = Engine(server.served)
    assert len(experts._forward_pre_hooks) == before + 1
    engine.close()
    assert len(experts._forward_pre_hooks) == before
    with pytest.raises(ApiError, match="shutting down"):
        engine.submit(object())  # type: ignore[arg-type]
