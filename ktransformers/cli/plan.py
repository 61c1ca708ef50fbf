"""`kt plan`: what a model will take and do on this machine, before a weight is read."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ktransformers.cli.chosen_rules import choose_rules
from ktransformers.cli.console import errors, listen_to_logs, results
from ktransformers.cli.failures import DOES_NOT_FIT
from ktransformers.cli.options import BackendName, ConfigModel, Legacy, Rules, Threads, Verbose

__all__ = ["plan"]


def plan(
    model: ConfigModel,
    rules: Rules = None,
    backend: BackendName = None,
    threads: Threads = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens in the cache. Default: 4096, or what the model has at most.")
    ] = None,
    legacy: Legacy = False,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure the memory bandwidth, for the ceiling of decoding.")
    ] = True,
    verbose: Verbose = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON, in bytes and tokens a second.")] = False,
) -> None:
    """Memory, formats, reads and the ceiling of decoding, without a weight read. Exit code 3 when it does not fit."""
    listen_to_logs()
    import kt_kernel
    from ktransformers import forecast

    chosen = choose_rules(model, rules, backend)
    bandwidth = kt_kernel.read_bandwidth(threads) if measure else None
    found = forecast(model, chosen, threads=threads, context=context, bandwidth=bandwidth, legacy=legacy)
    if as_json:
        results().print(json.dumps(found.as_dict(), indent=2), markup=False)
    else:
        for line in [*found.lines(verbose=verbose), "", *found.figures()]:
            results().print(line, markup=False)
    if not found.fits:
        errors().print("error: ", style="bold red", end="")
        errors().print("the model does not fit into this process's memory", markup=False)
        raise typer.Exit(DOES_NOT_FIT)
