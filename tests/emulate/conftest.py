"""The marker of tests that need the emulator."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "emulated: runs the kernel on an emulated CPU; some minutes; `-m 'not emulated'`"
    )
