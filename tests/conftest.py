"""Suite-wide settings: no network, one torch thread, a cache of its own, and a fresh memory of what is said once."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

# Before anything imports huggingface_hub, which reads them once: a test must never wait for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# Before torch: its threads cost more than they bring on tensors of a few thousand numbers. The kernel has its own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from ktransformers.log import forget_warnings
from tools.executed.records import load
from tools.executed.table import table


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--executed",
        type=Path,
        help="the folder in which the C++ tests, native, emulated and sanitized, leave their results (tools/executed); "
        "the table of them ends the output",
    )


# Outermost, so that the table comes after pytest's own summaries and only its closing line follows.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> Generator[None]:
    yield
    folder: Path | None = config.getoption("executed")
    if folder is not None:
        terminalreporter.section("executed: tier, format, how")
        terminalreporter.write_line(table(load(folder)))


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`kt run` keeps packed experts: not in the cache of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _warnings_speak_again() -> Iterator[None]:
    forget_warnings()
    yield
    forget_warnings()
