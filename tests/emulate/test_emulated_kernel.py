"""The C++ kernel tests on emulated CPUs, where an emulator can be had; otherwise skipped with the reason."""

from __future__ import annotations

import pytest

from tests.emulate.conftest import EmulatedRun

NOT_RUN = 77
LONGEST_SECONDS = 3600  # a time-out of its own ends every run long before


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.timeout(LONGEST_SECONDS + 60)
def test_every_tier_passes_its_tests_on_a_cpu_that_has_it(
    emulated_run: EmulatedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    status, output, said = emulated_run.wait(LONGEST_SECONDS)
    if status == NOT_RUN:
        pytest.skip(output.strip().splitlines()[-1])
    with capsys.disabled():  # the table belongs into the log of a passing suite, too
        print(f"\n{output}")
    assert status == 0, said[-8000:]
