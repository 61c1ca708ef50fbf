"""`kt verify`."""

from __future__ import annotations

import pytest

from ktransformers import verification
from tests.cli.conftest import Kt


def test_each_layer_is_a_line_with_its_error(kt: Kt, moe_folder: str) -> None:
    result = kt("verify", moe_folder, "--backend", "INT8", "--threads", "1", "--tokens", "8")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.strip().splitlines()
    assert all(line.startswith("model.layers.") and line.endswith(": fine") for line in lines), lines
    assert all("cosine 0.999" in line and "relative error" in line for line in lines)


def test_a_layer_that_is_wrong_is_exit_code_1(kt: Kt, moe_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verification.LEAST_COSINE, "INT8", 1.1)
    result = kt("verify", moe_folder, "--backend", "INT8", "--threads", "1")
    assert result.exit_code == 1
    assert "WRONG, at least 1.1 is usual" in result.stdout
    assert "compute something else than their float weights" in result.stderr
