"""One writer at a time in a folder."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kt_kernel.errors import WeightsError

__all__ = ["alone_in"]

logger = logging.getLogger("kt_kernel")


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Raises `WeightsError` when another run holds `folder`, which exists. No file is left: the system lets go
    of it when the process ends, however it ends.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WeightsError(
                f"another run writes into {folder} at this moment: wait for it, or pass another folder"
            ) from None
        except OSError as error:  # a file system without locks, such as some network ones
            logger.warning("%s cannot be locked (%s): see to it that no other run writes there", folder, error.strerror)
        yield
    finally:
        os.close(descriptor)
