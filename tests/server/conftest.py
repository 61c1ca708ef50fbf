"""A server in a thread of this process, with the model that ships, and a way to decide what that model writes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch

pytest.importorskip("openai", reason="the server and its tests need the packages of ktransformers[serve]")

from openai import OpenAI

from ktransformers import KTransformer
from ktransformers.generation import context_of
from ktransformers.server.engine import Engine
from ktransformers.server.run import Server, bind, url_of
from ktransformers.server.served import ServedModel
from ktransformers.server.start import serving

DEMO = str(Path(__file__).resolve().parents[2] / "demo" / "model")
NAME = "demo/model"
JSON = {"content-type": "application/json"}

Script = Callable[..., AbstractContextManager[None]]


@dataclass(frozen=True)
class Reply:
    """What came back, whatever its status."""

    status: int
    headers: dict[str, str]
    text: str

    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        """The error of an OpenAI answer: exactly its four fields."""
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)


def ask(
    url: str, body: bytes | None = None, *, method: str | None = None, headers: dict[str, str] | None = None
) -> Reply:
    """Any request, its body as it is."""
    request = Request(url, data=body, method=method, headers=headers or {})
    try:
        with urlopen(request, timeout=60) as answer:
            return Reply(answer.status, dict(answer.headers), answer.read().decode())
    except HTTPError as error:
        with error:
            return Reply(error.code, dict(error.headers), error.read().decode())


@dataclass
class Running:
    """A server that answers: the model it serves, its engine, and the official client."""

    url: str
    served: ServedModel
    engine: Engine
    client: Any  # OpenAI, whose types refuse the requests that are wrong on purpose

    def chat(self, content: str = "Once upon a time", **fields: Any) -> Any:
        """One user message, through the official client."""
        fields.setdefault("max_tokens", 8)
        messages = fields.pop("messages", [{"role": "user", "content": content}])
        return self.client.chat.completions.create(model=NAME, messages=messages, **fields)

    def post(self, body: Any, path: str = "/v1/chat/completions", **headers: str) -> Reply:
        """Any JSON at all."""
        return ask(self.url + path, json.dumps(body).encode(), headers={**JSON, **headers})

    def get(self, path: str) -> Reply:
        return ask(self.url + path)


@contextmanager
def running(served: ServedModel, **options: Any) -> Iterator[Running]:
    """Serves on a free port until the block ends."""
    ready = threading.Event()
    with bind("127.0.0.1", 0) as address, serving(served, ready.set, **options) as server:
        thread = threading.Thread(target=server.run, args=([address],))
        thread.start()
        try:
            assert ready.wait(20)
            url = url_of(address)
            key = options.get("api_key") or "none"
            with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
                yield Running(url, served, _engine_of(server), client)
        finally:
            server.should_exit = True
            thread.join()


def _engine_of(server: Server) -> Engine:
    engine = getattr(server.ending, "__self__", None)
    assert isinstance(engine, Engine)
    return engine


@pytest.fixture(scope="session")
def loaded() -> KTransformer:
    """The model that ships, its experts on the kernel."""
    return KTransformer.from_pretrained(DEMO, rules="auto", threads=1)


@pytest.fixture(scope="session")
def served(loaded: KTransformer) -> ServedModel:
    assert loaded.tokenizer is not None
    context = context_of(loaded.model, loaded.tokenizer)
    return ServedModel(NAME, loaded.model, loaded.tokenizer, context=context)


@pytest.fixture(scope="session")
def server(served: ServedModel) -> Iterator[Running]:
    with running(served) as started:
        yield started


@pytest.fixture(scope="session")
def small(served: ServedModel) -> Iterator[Running]:
    """The same model with a context of 64 tokens."""
    with running(ServedModel(NAME, served.model, served.tokenizer, context=64)) as started:
        yield started


@pytest.fixture
def script(served: ServedModel) -> Script:
    """`with script("text"):` makes the model write that text; `end` appends its end token, `at` calls you at a step."""

    @contextmanager
    def write(
        text: str | list[int], *, end: bool = True, at: dict[int, Callable[[], None]] | None = None
    ) -> Iterator[None]:
        ids = served.tokenizer.encode(text) if isinstance(text, str) else list(text)
        if end:
            ids.append(served.tokenizer.eos_token_id)
        step = 0

        def decide(module: Any, arguments: Any, logits: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
            nonlocal step
            (at or {}).get(step, lambda: None)()
            token = ids[step % len(ids)]
            step += 1
            decided = torch.full_like(logits, -100.0)
            decided[..., token] = 100.0
            return decided

        hook = served.model.lm_head.register_forward_hook(decide)
        try:
            yield
        finally:
            hook.remove()

    return write
