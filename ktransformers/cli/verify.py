"""`kt verify`: each layer on the kernel against transformers' own experts."""

from __future__ import annotations

from typing import Annotated

import typer

from ktransformers.cli.chosen_rules import choose_rules
from ktransformers.cli.console import listen_to_logs, results, say
from ktransformers.cli.failures import FAILED
from ktransformers.cli.options import BackendName, Legacy, Model, Rules, Threads

__all__ = ["verify"]


def verify(
    model: Model,
    rules: Rules = None,
    backend: BackendName = None,
    threads: Threads = None,
    tokens: Annotated[int, typer.Option(min=1, help="Random tokens for each layer.")] = 64,
    legacy: Legacy = False,
) -> None:
    """Random tokens through each layer and through its float original, which stay in memory. Exit code 1 when a layer
    is further from it than its format explains.
    """
    listen_to_logs()
    from ktransformers import KTransformer
    from ktransformers.errors import InjectionError
    from ktransformers.verification import verify as check_layers

    chosen = choose_rules(model, rules, backend)
    loaded = KTransformer.from_pretrained(model, chosen, threads=threads, keep_float=True, legacy=legacy)
    if loaded.report is None:
        raise InjectionError("no rule replaced anything: there is nothing to verify")
    bad = 0
    for layer in check_layers(loaded.model, loaded.report, tokens=tokens):
        bad += not layer.passed
        verdict = "fine" if layer.passed else f"WRONG, at least {layer.least_cosine} is usual"
        figures = f"cosine {layer.cosine:.5f}, relative error {layer.relative_error:.3%}"
        results().print(f"{layer.name}: {layer.runs}: {figures}: {verdict}", markup=False, soft_wrap=True)
    if bad:
        say(f"{bad} layer(s) compute something else than their float weights")
        raise typer.Exit(FAILED)
