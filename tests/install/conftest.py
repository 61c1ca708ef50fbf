from __future__ import annotations

from pathlib import Path

import pytest

from tests.install.machine import Machine, make_machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A healthy machine."""
    return make_machine(tmp_path / "machine")


@pytest.fixture
def bare_machine(tmp_path: Path) -> Machine:
    """A machine with neither compiler nor Python."""
    return make_machine(tmp_path / "machine", bare=True)
