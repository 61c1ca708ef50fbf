"""The command tree. Commands import torch and the models only when they run, so that help and typos answer at once."""

from __future__ import annotations

from typing import Annotated

import typer

from ktransformers.cli.chat import chat
from ktransformers.cli.convert import PASSED_ON, convert
from ktransformers.cli.doctor import doctor
from ktransformers.cli.failures import Guarded, show_tracebacks
from ktransformers.cli.plan import plan
from ktransformers.cli.rules import rules_app
from ktransformers.cli.run import run
from ktransformers.cli.serve import serve
from ktransformers.cli.verify import verify

__all__ = ["app"]

app = typer.Typer(
    cls=Guarded,
    help="Runs the experts of Mixture-of-Experts models on CPU kernels, swapped in by YAML rule files.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(run)
app.command()(chat)
app.command()(serve)
app.command()(plan)
app.command()(verify)
app.add_typer(rules_app, name="rules")
app.command(**PASSED_ON)(convert)
app.command()(doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("ktransformers"))
        raise typer.Exit


@app.callback()
def kt(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[  # noqa: ARG001 – its callback answers
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Runs the experts of Mixture-of-Experts models on CPU kernels, swapped in by YAML rule files."""
    show_tracebacks(debug)
