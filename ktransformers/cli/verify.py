"""`kt verify`: each layer on the kernel against transformers' own experts."""

from __future__ import annotations

from typing import Annotated

import typer

from ktransformers.cli.chosen_rules import choose_rules
from ktransformers.cli.console import listen_to_logs, results, say
from ktransformers.cli.failures import FAILED
from ktransformers.cli.options import BackendName, Legacy, Model, Rules, Threads, WeightsPath

__all__ = ["verify"]


def verify(
    model: Model,
    rules: Rules = None,
    backend: BackendName = None,
    threads: Threads = None,
    tokens: Annotated[int, typer.Option(min=1, help="Random tokens for each layer.")] = 64,
    weights_path: WeightsPath = None,
    legacy: Legacy = False,
) -> None:
    """Random tokens through each layer and through its float original, which is read again, a layer at a time. Exit
    code 1 when a layer is further from it than its format explains.
    """
    listen_to_logs()
    from ktransformers import KTransformer

    chosen = choose_rules(model, rules, backend)
    loaded = KTransformer.from_pretrained(model, chosen, threads=threads, weights_path=weights_path, legacy=legacy)
    bad = 0
    for layer in loaded.verify(tokens=tokens):
        bad += not layer.passed
        verdict = "fine" if layer.passed else f"WRONG, at least {layer.least_cosine} is usual"
        figures = f"cosine {layer.cosine:.5f}, relative error {layer.relative_error:.3%}"
        results().print(f"{layer.name}: {layer.runs}: {figures}: {verdict}", markup=False, soft_wrap=True)
    if bad:
        say(f"{bad} layer(s) compute something else than their float weights")
        raise typer.Exit(FAILED)
