"""`kt serve`: start, readiness, end, and what it says."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from typer.testing import Result

pytest.importorskip("openai", reason="the server and its tests need the packages of ktransformers[serve]")

from openai import OpenAI

from ktransformers.operators.experts import KTransformersExperts
from ktransformers.server import packages
from tests.cli.conftest import Kt

ROOT = Path(__file__).resolve().parents[2]
_READY = re.compile(r"ready: (http://\S+)/v1 serves (\S+);")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _serve_until_used(kt: Kt, use: Callable[[str], None], *arguments: str) -> Result:
    """`kt serve` in this process: `use(url)` once it answers, then SIGTERM."""
    url = f"http://127.0.0.1:{_free_port()}"
    problems: list[BaseException] = []

    def work() -> None:
        while True:
            try:
                urlopen(f"{url}/health", timeout=60).close()
                break
            except OSError:
                if ended.wait(0.02):
                    return
        try:
            use(url)
        except BaseException as error:
            problems.append(error)
        os.kill(os.getpid(), signal.SIGTERM)  # the server answers, so its handler is in place

    ended = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    result = kt("serve", *arguments, "--port", url.rpartition(":")[2])
    ended.set()
    thread.join()
    assert not problems, problems
    return result


def _said(result: Result) -> list[str]:
    """What each line on stderr is about."""
    return [line.split(":")[0].split()[0] for line in result.stderr.splitlines()]


def _chat(url: str, model: str, content: str, key: str = "none") -> Any:
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": content}]
        return client.chat.completions.create(model=model, messages=messages, max_tokens=2)


def test_it_serves_the_official_client_and_ends_on_sigterm(kt: Kt, moe_folder: str, tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("{{ messages[0].content }}")

    def use(url: str) -> None:
        answers.append(_chat(url, moe_folder, "abc"))

    answers: list[Any] = []
    result = _serve_until_used(kt, use, moe_folder, "--threads", "1", "--chat-template", str(template))
    assert result.exit_code == 0
    assert (answers[0].usage.prompt_tokens, answers[0].usage.completion_tokens) == (3, 2)
    # A healthy start has no warnings.
    assert _said(result) == [
        "rules",
        "model.layers.N.mlp.experts,",
        "cache",
        "memory",
        "try",
        "ready",
        "request",
        "stopped",
    ]
    assert ", 1 thread" in result.stderr
    assert "context: 512 tokens" in result.stderr
    (example,) = (line for line in result.stderr.splitlines() if line.startswith("try"))
    body = re.search(r"curl http://127.0.0.1:\d+/v1/chat/completions .* -d '(.*)'", example)
    assert body is not None
    assert json.loads(body[1])["model"] == moe_folder


def test_before_it_is_ready_every_layer_was_read_once(kt: Kt, moe_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[str] = []
    monkeypatch.setattr(KTransformersExperts, "warm_up", lambda layer: warmed.append(layer.key))
    before: list[int] = []
    _serve_until_used(kt, lambda _: before.append(len(warmed)), moe_folder, "--threads", "1")
    assert warmed == [f"model.layers.{n}.mlp.experts" for n in range(1, 3)]
    assert before == [2]


def test_a_model_without_a_template_says_so_at_the_start(kt: Kt, moe_folder: str) -> None:
    result = _serve_until_used(kt, lambda _: None, moe_folder)
    assert _said(result) == [
        "rules",
        "model.layers.N.mlp.experts,",
        "cache",
        "memory",
        "chat",
        "try",
        "ready",
        "stopped",
    ]
    assert "--chat-template FILE" in result.stderr


def test_context_key_and_origins_are_as_asked_for(kt: Kt, moe_folder: str) -> None:
    def use(url: str) -> None:
        with pytest.raises(HTTPError) as refused:
            urlopen(f"{url}/v1/models", timeout=60)
        refused.value.close()
        answers.append(refused.value.code)
        headers = {"authorization": "Bearer secret", "origin": "http://page.example"}
        with urlopen(Request(f"{url}/v1/models", headers=headers), timeout=60) as listed:
            answers.append(listed.headers["access-control-allow-origin"])
            answers.append(json.load(listed)["data"][0]["max_model_len"])

    answers: list[Any] = []
    options = ("--max-context", "200", "--api-key", "secret", "--enable-cors", "--verbose")
    result = _serve_until_used(kt, use, moe_folder, *options)
    assert answers == [401, "*", 200]
    assert "Authorization: Bearer" in result.stderr
    assert "context: 200 tokens" in result.stderr
    for layer in (1, 2):
        assert f"model.layers.{layer}.mlp.experts: rule 1" in result.stderr


def test_ctrl_c_ends_it_in_the_middle_of_an_answer() -> None:
    program = [sys.executable, "-c", "from ktransformers.cli import main; main()", "serve", "demo/model", "--port", "0"]
    with subprocess.Popen(program, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        ready = next(found for line in process.stderr if (found := _READY.match(line)))
        with OpenAI(base_url=f"{ready[1]}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(model="demo/model", prompt="The king", stream=True)
            next(iter(stream))
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert said.splitlines()[-1] == "stopped"
    assert "Traceback" not in said


def test_a_port_that_is_taken_is_named_before_anything_is_loaded(kt: Kt) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = kt("serve", "demo/model", "--port", str(port))
    assert result.exit_code == 1
    assert f"port {port} on 127.0.0.1 cannot be had" in result.stderr
    assert "--port" in result.stderr
    assert "mlp.experts" not in result.stderr


def test_an_address_of_another_machine_is_refused(kt: Kt) -> None:
    result = kt("serve", "demo/model", "--host", "192.0.2.1", "--port", "0")
    assert result.exit_code == 1
    assert "192.0.2.1" in result.stderr


@pytest.mark.parametrize("key", ["", "secret\n", " secret"])
def test_a_key_that_no_client_can_send_is_refused(kt: Kt, key: str) -> None:
    result = kt("serve", "no-model", "--api-key", key)
    assert result.exit_code == 2
    assert "--api-key" in result.stderr
    assert "no client can send" in result.stderr.replace("\n", " ")


def test_a_bad_rule_file_ends_it_at_once(kt: Kt, rule_file: Callable[[str], str]) -> None:
    bad = rule_file("- match:\n    name: 'nothing'\n  replace:\n    class: KTransformersExperts\n")
    result = kt("serve", "demo/model", "--rules", bad, "--port", "0")
    assert result.exit_code == 2
    assert "ready" not in result.stderr


def test_missing_packages_are_named_with_the_way_to_get_them(kt: Kt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_PACKAGES", ("fastapi", "no_such_package"))
    result = kt("serve", "demo/model")
    assert result.exit_code == 1
    assert "needs no_such_package" in result.stderr
    assert "pip install 'ktransformers[serve]'" in result.stderr


def test_a_context_beyond_the_model_s_is_refused(kt: Kt) -> None:
    result = kt("serve", "demo/model", "--max-context", "5000", "--port", "0")
    assert result.exit_code == 1
    assert "5000 tokens is more than the 1024" in result.stderr


def test_a_chat_template_file_that_is_not_there_is_said_before_loading(kt: Kt) -> None:
    result = kt("serve", "demo/model", "--chat-template", "none.jinja", "--port", "0")
    assert result.exit_code == 2
    assert "none.jinja cannot be read" in result.stderr
