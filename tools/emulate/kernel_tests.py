"""Runs the C++ kernel tests under emulation and prints the table tier × format × result.

    tools/emulate/run_kernel_tests                 everything, some minutes
    tools/emulate/run_kernel_tests amx avx2        these runs only
    tools/emulate/run_kernel_tests --list          the runs, and which tests each holds

Exit status: 0 passed, 1 failed, 77 not run (the emulator cannot be had here; one line says why).
"""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from tools.emulate.commands import say
from tools.emulate.emulator import Emulator, default_cache, prepare
from tools.emulate.errors import EmulationFailed, NotAvailable
from tools.emulate.extension import Bundle, bundle
from tools.emulate.extension import job as extension_job
from tools.emulate.job import Job, Tiles
from tools.emulate.kernel_build import build_kernel_tests, build_program, build_selftest
from tools.emulate.machine import run, stop_all
from tools.emulate.results import Run, missing, summary
from tools.emulate.scenarios import SCENARIOS, Scenario
from tools.executed.records import Record, keep, load, record_of
from tools.executed.table import table

PASSED, FAILED, NOT_RUN = 0, 1, 77
ON_REQUEST, EXTENSION = "on-request", "extension"
# Columns of the table of how what was executed.
NATIVE, EMULATED, EMULATED_EXTENSION = "native", "emulated", "emulated, from Python"
SELFTEST_SECONDS = 300


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; an unknown run ends the program with the names there are."""
    parser = argparse.ArgumentParser(
        prog="run_kernel_tests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*(scenario.name for scenario in SCENARIOS), ON_REQUEST, EXTENSION]
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"one of {', '.join(names)} (all of them)")
    parser.add_argument("--list", action="store_true", help="say what each run is, and stop")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="the prepared emulator (%(default)s)")
    parser.add_argument("--build", type=Path, help="build folder to use and keep (a new one each time)")
    parser.add_argument("--seconds", type=float, default=900, help="longest time for one run (%(default).0f)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at once (%(default)d)")
    parser.add_argument("--everything", action="store_true", help="the long tests too: some ten minutes a tier")
    parser.add_argument(
        "--executed",
        type=Path,
        help="a folder to keep the results in, for tools.executed; of tiers that it says passed natively, every kernel "
        "runs once",
    )
    parser.add_argument("--verbose", action="store_true", help="show the tests as they pass")
    parsed = parser.parse_args(words)
    for name in parsed.runs:
        if name not in names:
            nearest = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            parser.error(f"no run {name!r}{hint} Runs: {', '.join(names)}")
    parsed.runs = parsed.runs or names
    return parsed


def self_test(emulator: Emulator, folder: Path) -> None:
    """The emulator has to multiply right before it is believed about the kernel's products."""
    say("self-test of the emulator")
    job = Job(build_selftest(folder), tiles=Tiles.GRANTED, seconds=SELFTEST_SECONDS)
    outcome = run(emulator, job)
    if outcome.status != 0:
        raise EmulationFailed(f"the emulator's self-test failed ({outcome.status}):\n{outcome.output[-2000:]}")


def run_scenario(emulator: Emulator, program: Path, scenario: Scenario, options: argparse.Namespace) -> Run:
    """One boot with the tests of its tiers."""
    job = Job(
        program,
        scenario.arguments(passed_natively(options.executed), everything=options.everything),
        model=scenario.model,
        exclude=scenario.exclude,
        tiles=scenario.tiles,
        seconds=options.seconds,
    )
    return run_job(emulator, job, scenario.title, options, tiers=scenario.tiers)


def passed_natively(executed: Path | None) -> frozenset[str]:
    """The tiers that a folder of results knows as run on this machine's own CPU, without a failure."""
    records = load(executed) if executed is not None else []
    native = [record for record in records if record.how == NATIVE and record.problem is None]
    return frozenset(result.tier for record in native for result in record.results if result.tier)


def run_on_request(emulator: Emulator, folder: Path, options: argparse.Namespace) -> Run:
    """Tiers that are refused until the process has asked for them."""
    job = Job(build_program("permission", folder), tiles=Tiles.ON_REQUEST, seconds=options.seconds)
    return run_job(emulator, job, "AMX only after permission is asked", options)


def run_extension(emulator: Emulator, scenario: Scenario, needs: Bundle, options: argparse.Namespace) -> Run:
    """The Python extension as installed, on the CPU of a scenario."""
    job = extension_job(scenario, needs, options.seconds)
    return run_job(emulator, job, f"Python extension, {scenario.title}", options, how=EMULATED_EXTENSION)


def run_job(
    emulator: Emulator,
    job: Job,
    title: str,
    options: argparse.Namespace,
    *,
    how: str = EMULATED,
    tiers: tuple[str, ...] = (),
) -> Run:
    """One boot; its output is shown when it is no pass."""
    try:
        outcome = run(emulator, job, _show if options.verbose else _ignore)
    except EmulationFailed as error:
        say(f"{title}: {error}")
        return Run(title, Record(how, job.model, problem=str(error).splitlines()[0]), 0.0)
    record = record_of(how, outcome.output, outcome.status, job.model)
    record = replace(record, problem=record.problem or missing(tiers, record))
    if record.problem:
        say(f"output of {title}:\n{outcome.output[-4000:]}")
    return Run(title, record, outcome.seconds)


def _show(data: bytes) -> None:
    sys.stderr.buffer.write(data)
    sys.stderr.flush()


def _ignore(_: bytes) -> None:
    pass


def run_all(options: argparse.Namespace, folder: Path) -> tuple[list[Run], list[str]]:
    """Self-test, build, and every run asked for, in the order of the list; and which of them could not be, and why."""
    left_out = []
    emulator = prepare(options.cache)
    say(f"emulator: {', '.join(emulator.versions)}")
    folder.mkdir(parents=True, exist_ok=True)
    self_test(emulator, folder)
    program = build_kernel_tests(folder)
    jobs: list[Callable[[], Run]] = [
        partial(run_scenario, emulator, program, scenario, options)
        for scenario in SCENARIOS
        if scenario.name in options.runs
    ]
    if ON_REQUEST in options.runs:
        jobs.append(partial(run_on_request, emulator, folder, options))
    if EXTENSION in options.runs:
        try:
            needs = bundle()
            jobs += [partial(run_extension, emulator, scenario, needs, options) for scenario in SCENARIOS]
        except NotAvailable as error:
            left_out.append(f"Python extension: not run, {error}")
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        try:
            return list(pool.map(_announced, jobs)), left_out
        except BaseException:  # an interruption, too, must not leave emulators behind
            pool.shutdown(wait=False, cancel_futures=True)
            stop_all()
            raise


def _announced(job: Callable[[], Run]) -> Run:
    done = job()
    say(summary(done))
    return done


def main(words: Sequence[str] | None = None) -> int:
    """The command; see the text at the top of this file."""
    options = arguments(words)
    if options.list:
        for scenario in SCENARIOS:
            print(f"{scenario.name:11} {scenario.title} ({scenario.model}): {', '.join(scenario.tiers)}")
        print(f"{ON_REQUEST:11} AMX only after permission is asked (sapphire_rapids)")
        print(f"{EXTENSION:11} the installed Python extension, on each of these CPUs")
        return PASSED
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with tempfile.TemporaryDirectory(prefix="kt-emulate-build-") as scratch:
            runs, left_out = run_all(options, options.build or Path(scratch))
    except NotAvailable as error:
        if options.executed:
            keep(options.executed, Record(EMULATED, not_run=str(error)))
        print(f"emulated tests did not run: {error}")
        return NOT_RUN
    except EmulationFailed as error:
        if options.executed:
            keep(options.executed, Record(EMULATED, problem=str(error).splitlines()[0]))
        print(f"emulated tests failed: {error}")
        return FAILED
    for one in runs if options.executed else ():
        keep(options.executed, one.record, one.title)
    print(table([one.record for one in runs]))
    print()
    for line in [*map(summary, runs), *left_out]:
        print(line)
    print(f"{time.monotonic() - began:.0f} s in all")
    return PASSED if all(one.passed for one in runs) else FAILED
