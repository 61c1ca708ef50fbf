"""The C++ kernel tests on emulated CPUs, where an emulator can be had; otherwise skipped with the reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(__file__).resolve().parents[2] / "tools/emulate/run_kernel_tests"
NOT_RUN = 77
LONGEST_SECONDS = 3600  # a time-out of its own ends every run long before


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.timeout(LONGEST_SECONDS + 60)
def test_every_tier_passes_its_tests_on_a_cpu_that_has_it(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = request.config.getoption("executed")
    keep = () if folder is None else ("--executed", str(folder))
    done = subprocess.run(
        [sys.executable, str(COMMAND), *keep], capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False
    )
    if done.returncode == NOT_RUN:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    with capsys.disabled():  # the table belongs into the log of a passing suite, too
        print(f"\n{done.stdout}")
    assert done.returncode == 0, done.stderr[-8000:]
