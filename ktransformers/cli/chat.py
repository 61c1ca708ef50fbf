"""`kt chat`: a conversation in the terminal, or one turn a line from a pipe.

The model is in this process. transformers' own `transformers chat` needs a server and a terminal (it ends with an error
when a pipe does, and Ctrl-C ends all of it); against `kt serve` it works.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformers.cli.chat_template import read_template, tokenizer_of
from ktransformers.cli.chosen_rules import choose_rules
from ktransformers.cli.console import listen_to_logs, say
from ktransformers.cli.failures import WrongInputError
from ktransformers.cli.startup import Cache, WeightsPath, announce, load

if TYPE_CHECKING:
    from ktransformers.cli.conversation import Conversation

__all__ = ["chat"]

_COMMAND = re.compile(r"/[a-z]+")
_COMMANDS = {"/exit": "ends", "/reset": "forgets the conversation", "/help": "shows this"}


def chat(
    model: Annotated[str, typer.Argument(help="A model folder, or a model id in the local Hugging Face cache.")],
    rules: Annotated[
        str | None, typer.Option(help="A rule file, or the name of a shipped one. Default: by the model's type.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message, before all others.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="Overrides the backend of the rules: AMXINT8, AMXBF16, INT8, BF16, auto …")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Worker threads of the kernel. Default: KT_NUM_THREADS, else what the machine has."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens an answer has at most.")] = 1024,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="0 takes the likeliest token each time, more samples. Default: as the model says."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja file in the place of the model's own chat template.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Show what the model reads for each turn: text and ids.")] = False,
    weights_path: WeightsPath = None,
    cache: Cache = True,
    force: Annotated[bool, typer.Option("--force", help="Go on although the model does not fit into memory.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say what runs for each layer, not each range.")] = False,
) -> None:
    """Talk with a model. Ctrl-C stops an answer; /exit or Ctrl-D ends. From a pipe, each line is a turn."""
    listen_to_logs()
    import torch

    from ktransformers.cli.conversation import Conversation

    template = read_template(chat_template)
    rule_set = choose_rules(model, rules, backend)
    if seed is not None:
        torch.manual_seed(seed)
    announce(model, rule_set, threads=threads, verbose=verbose, force=force)
    loaded = load(model, rule_set, threads=threads, cache=cache, weights_path=weights_path)
    tokenizer = tokenizer_of(loaded, template)
    if not tokenizer.chat_template:
        raise WrongInputError(
            "this model has no chat template: `kt run` continues plain text, --chat-template FILE gives it a template"
        )
    options: dict[str, Any] = {}
    if temperature is not None:
        options = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    conversation = Conversation(loaded.model, tokenizer, system=system, max_new_tokens=max_new_tokens, **options)
    if _at_terminal():
        say(f"Ctrl-C stops an answer; {_help()}")
    for line in _lines():
        if not _obey(line, conversation):
            return
        if not _COMMAND.fullmatch(line):
            _take_turn(line, conversation, raw=raw)


def _at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _lines() -> Iterator[str]:
    """What is said, line by line; empty ones left out."""
    if not _at_terminal():
        yield from (line for part in sys.stdin or () if (line := part.strip()))
        return
    with suppress(ImportError):
        import readline  # noqa: F401 – arrow keys and a history for `input`
    while True:
        try:
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


def _take_turn(text: str, conversation: Conversation, *, raw: bool) -> None:
    try:
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
