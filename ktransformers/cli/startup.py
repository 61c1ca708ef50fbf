"""What `kt run`, `kt serve` and `kt chat` have in common: what they say before they read weights, and reading them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ktransformers.cli.console import say

if TYPE_CHECKING:
    from ktransformers import KTransformer
    from ktransformers.rules import RuleSet

__all__ = ["announce", "load", "warm_up"]


def announce(
    model: str,
    rules: RuleSet,
    *,
    threads: int | None = None,
    context: int | None = None,
    legacy: bool = False,
    verbose: bool = False,
    force: bool = False,
) -> None:
    """Says on stderr which rule puts what where and what will run, a line for each range of layers (`verbose`: for
    each module).

    Raises `DoesNotFitError` with the numbers for a model that needs more memory than there is with `context` tokens;
    with `force` that is only said.
    """
    from ktransformers import forecast
    from ktransformers.errors import DoesNotFitError

    found = forecast(model, rules, threads=threads, context=context, legacy=legacy)
    for line in found.lines(verbose=verbose) or ["experts: transformers' own, no rule replaces any"]:
        say(line)
    try:
        found.raise_unless_fits()
    except DoesNotFitError as error:
        if not force:
            raise DoesNotFitError(f"{error}. `--force` goes on all the same") from None
        say(f"warning: {error}")


def load(
    model: str,
    rules: RuleSet | None,
    *,
    threads: int | None,
    cache: bool,
    weights_path: Path | None,
    legacy: bool = False,
) -> KTransformer:
    """The model, and a line on stderr about what came from the cache."""
    from ktransformers import KTransformer

    loaded = KTransformer.from_pretrained(
        model, rules, threads=threads, cache=cache, weights_path=weights_path, legacy=legacy
    )
    if note := getattr(getattr(loaded.model, "hf_quantizer", None), "cache_note", ""):
        say(note)
    return loaded


def warm_up(loaded: KTransformer) -> None:
    """For who is ready only when requests are answered at full speed: a second start has mapped its packed experts, and
    read none of them.
    """
    from ktransformers.injection.progress import track
    from ktransformers.operators.experts import KTransformersExperts

    layers = [(name, m) for name, m in loaded.model.named_modules() if isinstance(m, KTransformersExperts)]
    with track("Warming up", len(layers)) as done:
        for name, layer in layers:
            layer.warm_up()
            done(name)
