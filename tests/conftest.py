"""Suite-wide settings: no network, one torch thread, and a fresh memory of the warnings that are said once."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before anything imports huggingface_hub, which reads them once: a test must never wait for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# Before torch: its threads cost more than they bring on tensors of a few thousand numbers. The kernel has its own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from ktransformers.log import forget_warnings


@pytest.fixture(autouse=True)
def _warnings_speak_again() -> Iterator[None]:
    forget_warnings()
    yield
    forget_warnings()
