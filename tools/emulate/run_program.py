"""Runs any Linux x86-64 program on an emulated CPU: `tools/emulate/run_program [options] PROGRAM [ARGS…]`.

Its output goes to stdout as it comes. Exit status: the program's; 128 + N when signal N ended it; 124 on time-out;
125 when the emulator failed; 77 when there is no emulator.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.emulate.emulator import default_cache, prepare
from tools.emulate.errors import EmulationFailed, NotAvailable
from tools.emulate.job import Job, Tiles
from tools.emulate.machine import run

NOT_AVAILABLE, EMULATOR_FAILED = 77, 125


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="run_program", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="sapphire_rapids", help="CPU model, as Bochs names it (%(default)s)")
    parser.add_argument("--exclude", default="", help="CPU features to leave out, as Bochs names them")
    tiles = parser.add_mutually_exclusive_group()
    tiles.add_argument("--no-amx", action="store_true", help="a CPU without AMX")
    tiles.add_argument("--amx-on-request", action="store_true", help="tiles only after arch_prctl has asked for them")
    parser.add_argument("--add", action="append", default=[], metavar="HOST[:GUEST]", help="a file or folder; /test")
    parser.add_argument("--libs-of", action="append", default=[], type=Path, metavar="FILE", help="its libraries too")
    parser.add_argument("--env", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--mem", type=int, default=512, help="MiB of memory (%(default)s)")
    parser.add_argument("--seconds", type=float, default=600, help="longest time (%(default).0f)")
    parser.add_argument("--no-fifo", action="store_true", help="ordinary scheduling: not with tiles in several threads")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="the prepared emulator (%(default)s)")
    parser.add_argument("program", type=Path)
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return parser.parse_args(words)


def added(text: str) -> tuple[Path, str]:
    """HOST or HOST:GUEST."""
    host, colon, guest = text.partition(":")
    return Path(host), guest if colon else f"/test/{Path(host).name}"


def job_of(options: argparse.Namespace) -> Job:
    """The command line as a job."""
    return Job(
        options.program,
        tuple(options.args),
        model=options.model,
        exclude=tuple(options.exclude.split()),
        tiles=Tiles.ABSENT if options.no_amx else Tiles.ON_REQUEST if options.amx_on_request else Tiles.GRANTED,
        files=tuple(added(text) for text in options.add),
        libraries_of=tuple(options.libs_of),
        environment=dict(text.split("=", 1) for text in options.env),
        memory_mib=options.mem,
        fifo=not options.no_fifo,
        seconds=options.seconds,
    )


def main(words: Sequence[str] | None = None) -> int:
    """The command; see the text at the top of this file."""
    options = arguments(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that the emulator ends too

    def show(data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()

    try:
        return run(prepare(options.cache), job_of(options), show).status
    except NotAvailable as error:
        print(f"no emulator: {error}", file=sys.stderr)
        return NOT_AVAILABLE
    except EmulationFailed as error:
        print(f"emulation failed: {error}", file=sys.stderr)
        return EMULATOR_FAILED
