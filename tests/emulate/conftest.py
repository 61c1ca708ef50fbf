"""The emulated run starts with the session and computes beside the other tests, on the core that they leave free."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ROOT / "tools/emulate/run_kernel_tests"
# The suite's own build, where there is one: the emulated program is then linked of its objects.
SUITE_BUILD = ROOT / "build/cpp-tests"
MARK = "emulated"


@dataclass
class EmulatedRun:
    """The command, running; what it says goes to files."""

    process: subprocess.Popen[bytes]
    folder: tempfile.TemporaryDirectory[str]

    def wait(self, seconds: float) -> tuple[int, str, str]:
        """Its exit status, its output and what it said on the way."""
        status = self.process.wait(seconds)
        folder = Path(self.folder.name)
        return status, (folder / "out").read_text(), (folder / "err").read_text()

    def end(self) -> None:
        """Ends it with the emulators that it started."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
        self.folder.cleanup()


_KEY = pytest.StashKey[EmulatedRun]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"{MARK}: runs the kernel on an emulated CPU; some minutes; `-m 'not {MARK}'` leaves it out"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who waits for it comes last."""
    items.sort(key=lambda item: item.get_closest_marker(MARK) is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted = any(item.get_closest_marker(MARK) for item in session.items)
    if wanted and not session.config.option.collectonly:
        session.config.stash[_KEY] = _started(session.config.getoption("executed"))


def pytest_unconfigure(config: pytest.Config) -> None:
    if _KEY in config.stash:
        config.stash[_KEY].end()


@pytest.fixture
def emulated_run(request: pytest.FixtureRequest) -> EmulatedRun:
    return request.config.stash[_KEY]


def _started(executed: Path | None) -> EmulatedRun:
    command = [sys.executable, str(COMMAND)]
    if (SUITE_BUILD / "CMakeCache.txt").exists():
        command += ["--build", str(SUITE_BUILD)]
    if executed is not None:
        command += ["--executed", str(executed)]
    folder = tempfile.TemporaryDirectory(prefix="kt-emulated-")
    with (Path(folder.name) / "out").open("wb") as out, (Path(folder.name) / "err").open("wb") as err:
        # The other tests go first: theirs are the ones that wait for answers.
        process = subprocess.Popen(command, stdout=out, stderr=err, preexec_fn=lambda: os.nice(15) and None)
    return EmulatedRun(process, folder)
