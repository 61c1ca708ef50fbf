"""Address, start and end of the server."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn

from ktransformers.errors import ServingError

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["Server", "bind", "run_server", "url_of"]

_PATIENCE = 1  # seconds that open answers get when the server is told to end


def bind(host: str, port: int) -> socket.socket:
    """A socket of that address, which does not listen yet: until the server is ready, clients are refused.

    `port` 0 takes a free one. Raises `ServingError` where the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ServingError(f'--host "{host}" is no address of this machine: {error}') from error
    bound = socket.socket(family, kind, protocol)
    try:
        # Or a port stays taken for a minute after its last server.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _not_to_be_had(host, port, error) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """Where clients on this machine find the server."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Calls `ready` once clients are answered, and `ending` as soon as the server is told to end."""

    def __init__(self, app: FastAPI, *, ready: Callable[[], None], ending: Callable[[], None]) -> None:
        # Its own log would repeat ours: errors are answers, and a line each tells of requests.
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="critical",
            access_log=False,
            timeout_graceful_shutdown=_PATIENCE,
            lifespan="on",
            ws="none",
        )
        super().__init__(config)
        self._ready = ready
        self.ending = ending

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does, then the word that it is done."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """First the word, so that no answer is left to wait for."""
        self.ending()
        await super().shutdown(sockets)


def run_server(server: Server, bound: socket.socket) -> None:
    """Serves until SIGINT or SIGTERM; returns then. Raises `ServingError` where another process took the port."""
    host, port = bound.getsockname()[:2]
    try:
        with _quiet_signals():
            server.run(sockets=[bound])
    except OSError as error:
        raise _not_to_be_had(host, port, error) from error


@contextmanager
def _quiet_signals() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more when it is done: nothing is left to do then."""

    def ignore(*_: Any) -> None:
        pass

    before = {number: signal.signal(number, ignore) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _not_to_be_had(host: str, port: int, error: OSError) -> ServingError:
    reason = error.strerror or str(error)
    return ServingError(f"port {port} on {host} cannot be had: {reason}. Another server may have it: choose --port")
