"""A build of the C++ tests to look into: the suite's own where there is one, else one made for this session."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITE_BUILD = ROOT / "build" / "cpp-tests"


def run(*command: str | Path) -> None:
    """Runs a build step; its output becomes the failure's text."""
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.fail(f"{' '.join(str(word) for word in command)}\n{result.stdout[-3000:]}{result.stderr[-3000:]}")


@pytest.fixture(scope="session")
def cmake() -> str:
    """Path of cmake; ninja has to be there too."""
    found = shutil.which("cmake")
    if found is None or shutil.which("ninja") is None:
        pytest.skip("cmake and ninja are not on PATH; ./install.sh test brings them")
    return found


@pytest.fixture(scope="session")
def build(cmake: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build folder whose objects are up to date."""
    folder = SUITE_BUILD
    if not (folder / "CMakeCache.txt").exists():
        folder = tmp_path_factory.mktemp("cpp")
        run(cmake, "-S", ROOT / "kernel", "-B", folder, "-G", "Ninja", "-DKT_BUILD_PYTHON=OFF", "-DKT_BUILD_TESTS=ON")
    run(cmake, "--build", folder)
    return folder
