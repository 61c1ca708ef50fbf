"""Around the app, for each connection: who may ask, how much may be sent, and what happens when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, TypeAlias

from ktransformers.server.errors import ApiError

__all__ = ["Connection"]

Scope: TypeAlias = MutableMapping[str, Any]
Event: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Event]]
Send: TypeAlias = Callable[[Event], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BYTES = 8 << 20  # of a body: some two million tokens, and parsed within a second
_MOST_DROPPED = 8 * MOST_BYTES
_OPEN = "/health"  # for those who watch the server and have no key


class Connection:
    """ASGI middleware. Reads the body first, then runs the app and ends it as soon as the client has left.

    The app alone would notice that only while it streams, and compute whole answers for nobody.
    """

    def __init__(self, app: App, *, api_key: str | None) -> None:
        self._app = app
        self._key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. Anything but HTTP passes through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            body = await _read(receive)
        except ApiError as error:
            await _respond(error, send)
            return
        if body is not None:
            await self._run(scope, body, receive, send)

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        unread = [body]
        answered = False
        left = asyncio.Event()

        async def replay() -> Event:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def watched_send(event: Event) -> None:
            nonlocal answered
            await send(event)
            answered = answered or (event["type"] == "http.response.body" and not event.get("more_body"))

        work = asyncio.ensure_future(self._app(scope, replay, watched_send))
        leaving = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
            left.set()
            if not work.done() and not answered:
                work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
        finally:
            work.cancel()
            leaving.cancel()

    def _check_key(self, scope: Scope) -> None:
        if self._key is None or scope["path"] == _OPEN:
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, b"Bearer " + self._key.encode()):
            raise ApiError(
                "this server asks for its API key, as a header: authorization: Bearer KEY",
                status=HTTPStatus.UNAUTHORIZED,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


async def _read(receive: Receive) -> bytes | None:
    """The whole body; None when the client left meanwhile. Raises `ApiError` (413) for one that is too long."""
    body, size = b"", 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            return None
        part = bytes(event.get("body", b""))
        size += len(part)
        # What is too long is read on for a while and dropped: most clients look for an answer only when all is sent.
        body = body + part if size <= MOST_BYTES else b""
        if size > _MOST_DROPPED or (size > MOST_BYTES and not event.get("more_body")):
            raise ApiError(f"the body has more than {MOST_BYTES} bytes", status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        if not event.get("more_body"):
            return body


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _respond(error: ApiError, send: Send) -> None:
    headers = {"content-type": "application/json", "connection": "close", **error.headers}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": json.dumps(error.body).encode()})
