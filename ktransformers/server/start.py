"""From a loaded model to a server that is ready to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ktransformers.errors import ServingError
from ktransformers.server.app import build_app
from ktransformers.server.engine import Engine
from ktransformers.server.run import Server
from ktransformers.server.served import ServedModel

__all__ = ["check_context", "serving"]


@contextmanager
def serving(served: ServedModel, ready: Callable[[], None], **options: Any) -> Iterator[Server]:
    """A server for `served`, with its engine running; `options` are those of `build_app`. Ends the engine with it."""
    engine = Engine(served)
    try:
        yield Server(build_app(served, engine, **options), ready=ready, ending=engine.abort)
    finally:
        engine.close()


def check_context(known: int | None, wanted: int | None) -> int | None:
    """The context to serve: `wanted`, else what the model was made for. Raises `ServingError` for more than that."""
    if wanted is not None and known is not None and wanted > known:
        raise ServingError(f"a context of {wanted} tokens is more than the {known} that this model was made for")
    return known if wanted is None else wanted
