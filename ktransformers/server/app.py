"""transformers' FastAPI app around the served model, without the routes that one model has no use for."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerationState

from ktransformers.server.connection import Connection
from ktransformers.server.engine import Engine
from ktransformers.server.errors import answer_errors
from ktransformers.server.handlers import ChatHandler, TextHandler
from ktransformers.server.served import ServedModel

__all__ = ["build_app"]

# transformers' routes that stay. `/reset` would take the model away; speech and typed decisions need other models.
_KEPT = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models", "/load_model"})


def build_app(served: ServedModel, engine: Engine, *, api_key: str | None = None, cors: bool = False) -> FastAPI:
    """The app that answers for `served`.

    Args:
        engine: computes the answers; the caller closes it.
        api_key: what clients have to send as bearer token; None: nothing.
        cors: let pages of any origin ask, as browser clients on another host do.
    """
    build: Any = build_server  # its types name the manager of many models and handlers that are not wanted here
    app: FastAPI = build(
        served, ChatHandler(served, engine), TextHandler(served, engine), None, None, None, GenerationState()
    )
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in _KEPT]

    @app.get("/v1/models/{name:path}")
    def one_model(name: str) -> dict[str, Any]:
        served.check_name(name)
        return served.describe()

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "model": served.name, "running": engine.running, "waiting": engine.waiting}

    answer_errors(app)
    app.add_middleware(Connection, api_key=api_key)
    if cors:  # outermost: a browser's preflight has no key, and has to see the errors too
        app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    return app
