"""Each test starts with no variable of ours in the environment and with nothing said yet."""

from __future__ import annotations

import pytest

from kt_kernel import arrays, contexts, environment, tier


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in environment.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setattr(tier, "_said", set())
    monkeypatch.setattr(contexts, "_said", set())
    monkeypatch.setattr(arrays, "_gradient_said", False)
