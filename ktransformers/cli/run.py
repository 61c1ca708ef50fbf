"""`kt run`: a model writes text, its experts on the kernel."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ktransformers.cli.chosen_rules import choose_rules
from ktransformers.cli.console import listen_to_logs, say
from ktransformers.cli.failures import WrongInputError
from ktransformers.cli.options import (
    BackendName,
    Cache,
    Force,
    Legacy,
    Model,
    Rules,
    Seed,
    Temperature,
    Threads,
    Verbose,
    WeightsPath,
)
from ktransformers.cli.startup import announce, load

__all__ = ["run"]

DEFAULT_PROMPT = "Once upon a time"


def run(
    model: Model,
    rules: Rules = None,
    prompt: Annotated[
        str | None, typer.Option(help=f'What to continue. Default: what is piped in, else "{DEFAULT_PROMPT}".')
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write at most.")] = 128,
    backend: BackendName = None,
    threads: Threads = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    temperature: Temperature = None,
    seed: Seed = None,
    weights_path: WeightsPath = None,
    cache: Cache = True,
    force: Force = False,
    verbose: Verbose = False,
    legacy: Legacy = False,
) -> None:
    """Let a model write. The text goes to stdout; rules, backends and speed go to stderr."""
    listen_to_logs()
    import torch

    from ktransformers.cli.clock import TokenClock
    from ktransformers.generation import sampling

    rule_set = choose_rules(model, rules, backend)
    if seed is not None:
        torch.manual_seed(seed)
    question = _read_prompt(prompt)
    # A token is a character at least, so this is what the context can come to.
    context = len(question) + max_new_tokens
    announce(model, rule_set, threads=threads, context=context, legacy=legacy, verbose=verbose, force=force)
    loaded = load(model, rule_set, threads=threads, cache=cache, weights_path=weights_path, legacy=legacy)
    clock = TokenClock()
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "logits_processor": [clock], **sampling(temperature)}
    try:
        pieces = loaded.stream(question, chat=chat, **options)
    except ValueError as error:  # no chat template, no prompt or no text
        raise WrongInputError(str(error)) from error
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    say(f"speed: {clock}")


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None:
        return prompt
    try:
        piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise WrongInputError(
            f"what is piped in is no {error.encoding} text, see its byte {error.start + 1}: a prompt is text in UTF-8"
        ) from error
    return piped.strip() or DEFAULT_PROMPT
