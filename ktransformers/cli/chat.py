"""`kt chat`: a conversation in the terminal, or one turn a line from a pipe.

The model is in this process. transformers' own `transformers chat` needs a server and a terminal (it ends with an error
when a pipe does, and Ctrl-C ends all of it); against `kt serve` it works.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformers.cli.chat_template import read_template, tokenizer_of
from ktransformers.cli.chosen_rules import choose_rules
from ktransformers.cli.console import listen_to_logs, say
from ktransformers.cli.ctrl_c import CtrlC
from ktransformers.cli.failures import WrongInputError
from ktransformers.cli.options import (
    BackendName,
    Cache,
    ChatTemplate,
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

if TYPE_CHECKING:
    from ktransformers.cli.conversation import Conversation

__all__ = ["chat"]

_COMMAND = re.compile(r"/[a-z]+")
_COMMANDS = {"/exit": "ends", "/reset": "forgets the conversation", "/help": "shows this"}


def chat(
    model: Model,
    rules: Rules = None,
    system: Annotated[str | None, typer.Option(help="The system message, before all others.")] = None,
    backend: BackendName = None,
    threads: Threads = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens an answer has at most.")] = 1024,
    temperature: Temperature = None,
    seed: Seed = None,
    chat_template: ChatTemplate = None,
    raw: Annotated[bool, typer.Option("--raw", help="Show what the model reads for each turn: text and ids.")] = False,
    weights_path: WeightsPath = None,
    cache: Cache = True,
    force: Force = False,
    verbose: Verbose = False,
    legacy: Legacy = False,
) -> None:
    """Talk with a model. Ctrl-C stops an answer; /exit or Ctrl-D ends. From a pipe, each line is a turn."""
    listen_to_logs()
    import torch

    from ktransformers.cli.conversation import Conversation
    from ktransformers.generation import sampling

    template = read_template(chat_template)
    rule_set = choose_rules(model, rules, backend)
    if seed is not None:
        torch.manual_seed(seed)
    announce(model, rule_set, threads=threads, legacy=legacy, verbose=verbose, force=force)
    loaded = load(model, rule_set, threads=threads, cache=cache, weights_path=weights_path, legacy=legacy)
    tokenizer = tokenizer_of(loaded, template)
    if not tokenizer.chat_template:
        raise WrongInputError(
            "this model has no chat template: `kt run` continues plain text, --chat-template FILE gives it a template"
        )
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, **sampling(temperature)}
    conversation = Conversation(loaded.model, tokenizer, system=system, **options)
    if _at_terminal():
        say(f"Ctrl-C stops an answer; {_help()}")
    ctrl_c = CtrlC()
    with ctrl_c.ignored() if _at_terminal() else nullcontext():
        for line in _lines(ctrl_c):
            if not _obey(line, conversation):
                return
            if not _COMMAND.fullmatch(line):
                _take_turn(line, conversation, ctrl_c, raw=raw)


def _at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _lines(ctrl_c: CtrlC) -> Iterator[str]:
    """What is said, line by line; empty ones left out."""
    if not _at_terminal():
        yield from (line for part in sys.stdin or () if (line := part.strip()))
        return
    with suppress(ImportError):
        import readline  # noqa: F401 – arrow keys and a history for `input`
    while True:
        try:
            with ctrl_c.heard():
                line = input("> ").strip()
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            say("\n/exit or Ctrl-D ends")
            continue
        if line:
            yield line


def _obey(line: str, conversation: Conversation) -> bool:
    """Carries out a command; False when it is the one that ends."""
    if line == "/reset":
        conversation.reset()
        say("a new conversation")
    elif _COMMAND.fullmatch(line) and line != "/exit":
        say(_help() if line == "/help" else f"there is no command {line}: {_help()}")
    return line != "/exit"


def _help() -> str:
    return ", ".join(f"{name} {meaning}" for name, meaning in _COMMANDS.items())


def _take_turn(text: str, conversation: Conversation, ctrl_c: CtrlC, *, raw: bool) -> None:
    try:
        with ctrl_c.heard():
            if raw:
                prompt, ids = conversation.prompt(text)
                say(f"the model reads: {prompt!r}")
                say(f"as {len(ids)} tokens: {' '.join(map(str, ids))}")
            for piece in conversation.answer(text):
                sys.stdout.write(piece)
                sys.stdout.flush()
            sys.stdout.write("\n")
            sys.stdout.flush()
    except WrongInputError as error:
        if not _at_terminal():
            raise  # a script is to end with the code of an error
        say(str(error))
    except KeyboardInterrupt:
        if not _at_terminal():
            raise
        say("\nstopped")
    else:
        _say_how_it_went(conversation)


def _say_how_it_went(conversation: Conversation) -> None:
    if conversation.cut:
        say(f"the answer was cut at {len(conversation.clock.ticks)} tokens")
    if _at_terminal():
        say(f"speed: {conversation.clock}")
