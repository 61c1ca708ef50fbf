"""The one logger. No handler is added here: warnings reach stderr by Python's default, programs configure the rest."""

from __future__ import annotations

import logging
import threading

__all__ = ["get_logger", "logger", "warn_once"]

logger: logging.Logger = logging.getLogger("ktransformers")

_said: set[str] = set()
_lock = threading.Lock()


def get_logger(room: str) -> logging.Logger:
    """The child logger of a room: `get_logger("injection")` is `ktransformers.injection`."""
    return logger.getChild(room)


def warn_once(message: str, *, key: str | None = None) -> bool:
    """Logs a warning the first time this process meets `key` (default: the message); True when it was logged."""
    with _lock:
        if (key or message) in _said:
            return False
        _said.add(key or message)
    logger.warning(message)
    return True


def forget_warnings() -> None:
    """Lets every `warn_once` speak again. For tests."""
    with _lock:
        _said.clear()
