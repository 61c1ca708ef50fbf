"""`kt serve`: the model behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ktransformers.cli.chat_template import read_template, tokenizer_of
from ktransformers.cli.chosen_rules import choose_rules
from ktransformers.cli.console import hear_requests, listen_to_logs, say
from ktransformers.cli.options import (
    BackendName,
    Cache,
    ChatTemplate,
    Force,
    Legacy,
    Model,
    Rules,
    Threads,
    Verbose,
    WeightsPath,
)
from ktransformers.cli.startup import announce, load, warm_up

if TYPE_CHECKING:
    from ktransformers.server.served import ServedModel

__all__ = ["serve"]


def _sendable(key: str | None) -> str | None:
    if key is not None and (not key or key != key.strip()):
        raise typer.BadParameter("no client can send a key that is empty or has blanks around it")
    return key


def serve(
    model: Model,
    rules: Rules = None,
    backend: BackendName = None,
    threads: Threads = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    max_context: Annotated[
        int | None, typer.Option(min=2, help="Tokens of prompt and answer together. Default: as the model was made.")
    ] = None,
    chat_template: ChatTemplate = None,
    api_key: Annotated[
        str | None, typer.Option(help="Answer only to clients that send this key.", callback=_sendable)
    ] = None,
    enable_cors: Annotated[bool, typer.Option("--enable-cors", help="Let web pages of any origin ask.")] = False,
    weights_path: WeightsPath = None,
    cache: Cache = True,
    force: Force = False,
    verbose: Verbose = False,
    legacy: Legacy = False,
) -> None:
    """Serve a model to OpenAI clients: /v1/chat/completions, /v1/completions, /v1/models, /health."""
    listen_to_logs()
    from ktransformers.server import require_packages

    require_packages()
    from ktransformers.generation import context_of
    from ktransformers.server.run import bind, run_server, url_of
    from ktransformers.server.served import ServedModel
    from ktransformers.server.start import check_context, serving

    template = read_template(chat_template)
    rule_set = choose_rules(model, rules, backend)
    with bind(host, port) as address:  # before minutes of loading: a port that is taken is known now
        announce(model, rule_set, threads=threads, context=max_context, legacy=legacy, verbose=verbose, force=force)
        loaded = load(model, rule_set, threads=threads, cache=cache, weights_path=weights_path, legacy=legacy)
        warm_up(loaded)
        tokenizer = tokenizer_of(loaded, template)
        context = check_context(context_of(loaded.model, tokenizer), max_context)
        served = ServedModel(model.rstrip("/") or model, loaded.model, tokenizer, context=context)
        url = url_of(address)
        hear_requests()

        def ready() -> None:
            _announce(served, url, has_key=api_key is not None)

        with serving(served, ready, api_key=api_key, cors=enable_cors) as server:
            run_server(server, address)
    say("stopped")


def _announce(served: ServedModel, url: str, *, has_key: bool) -> None:
    import psutil

    memory = psutil.Process().memory_info().rss / 2**30
    say(f"memory: {memory:.2f} GiB in use; context: {served.context or 'unlimited'} tokens")
    if not served.tokenizer.chat_template:
        say("chat: this model has no chat template; /v1/completions works, --chat-template FILE gives it one")
    request = json.dumps({"model": served.name, "messages": [{"role": "user", "content": "Hello"}]})
    key = " -H 'Authorization: Bearer …'" if has_key else ""
    say(f"try: curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{request}'")
    say(f"ready: {url}/v1 serves {served.name}; Ctrl-C ends it")
