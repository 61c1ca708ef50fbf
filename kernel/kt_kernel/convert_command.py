"""The command line of the converter, `convert_cpu_weights.py` and `kt convert`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kt_kernel.converter import METHODS, Progress, Step, convert
from kt_kernel.errors import BackendError, ConfigError, KernelError

__all__ = ["main"]

OK, FAILED, USAGE = 0, 1, 2
INTERRUPTED = 130

# Other spellings of methods, and options of ktransformers' original script that change nothing here, each with its
# reason.
_UPSTREAM_METHODS = {"int8": "AMXINT8", "moe_int8": "AMXINT8", "int4": "AMXINT4", "moe_int4": "AMXINT4"}
_WITH_VALUE = ("--input-type", "--threadpool-count", "--resume-layer")
_WITHOUT_EFFECT = {
    "--input-type": "the checkpoint says what it holds",
    "--threadpool-count": "the files do not depend on the number of threads or NUMA nodes",
    "--resume-layer": "a run goes on where an earlier one stopped by itself",
    "--no-merge-safetensor": "there is one file a layer",
    "--gpu": "weights are packed by the CPU",
    "--profile": "a run shows its rate",
}


def main(arguments: Sequence[str] | None = None, prog: str = "convert_cpu_weights.py") -> int:
    """Exit status: 0 converted, 1 could not be, 2 the command line is wrong. Errors are one sentence on stderr."""
    parser = _parser(prog)
    options = parser.parse_args(arguments)
    for option in _WITHOUT_EFFECT:
        if getattr(options, _attribute(option)) not in (None, False):
            sys.stderr.write(f"{prog}: {option} has no effect: {_WITHOUT_EFFECT[option]}\n")
    try:
        with _progress() as progress:
            report = convert(
                options.input,
                options.output,
                options.method,
                threads=options.threads,
                rotate=options.rotate,
                progress=progress,
            )
    except (BackendError, ConfigError) as error:
        return _fail(parser, error, USAGE)
    except (KernelError, OSError, MemoryError) as error:
        return _fail(parser, error, FAILED)
    except KeyboardInterrupt:
        return _fail(parser, "interrupted; the same command goes on where it stopped", INTERRUPTED)
    kept = f", {len(report.kept)} already there" if report.kept else ""
    size = report.nbytes / 2**20
    sys.stdout.write(f"{len(report.written)} layer(s) converted{kept}: {size:.1f} MiB in {report.output}\n")
    return OK


def _attribute(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Packs the experts of a safetensors checkpoint for the CPU kernel, one file a layer.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--input",
        "--input-path",
        "-i",
        type=_path,
        required=True,
        help="a .safetensors file, its index, or the checkpoint's folder",
    )
    parser.add_argument(
        "--output", "-o", type=_path, required=True, help="folder for the packed files, made if not there"
    )
    parser.add_argument(
        "--method",
        "--quant-method",
        required=True,
        type=_method,
        metavar="|".join(METHODS),
        help="case does not matter; int8 is AMXINT8, int4 AMXINT4",
    )
    parser.add_argument(
        "--threads", "--cpuinfer-threads", type=int, help="default: KT_NUM_THREADS, else the physical cores there are"
    )
    parser.add_argument(
        "--no-rotate",
        dest="rotate",
        action="store_false",
        help="INT8, INT4: quantise without rotating first; the wrapper then needs rotate=False",
    )
    for option in _WITHOUT_EFFECT:
        takes = {} if option in _WITH_VALUE else {"action": "store_true"}
        parser.add_argument(option, help=argparse.SUPPRESS, **takes)  # type: ignore[arg-type]
    return parser


def _path(written: str) -> Path:
    if not written:  # a shell variable that was never set; Path would take it for the folder we are in
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(written)


def _method(written: str) -> str:
    return _UPSTREAM_METHODS.get(written.lower(), written)


@contextmanager
def _progress() -> Iterator[Progress]:
    """On a terminal a bar on stderr with layers, rate and time left, else nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    layers = TextColumn("{task.fields[layers]}")
    columns = TextColumn("{task.description}"), BarColumn(), layers, TransferSpeedColumn(), TimeRemainingColumn()
    # A layer of a large model takes a minute: the rate is that of the last few.
    shown = {"transient": True, "speed_estimate_period": 600, "disable": not console.is_terminal}
    with Bar(*columns, console=console, **shown) as bar:  # type: ignore[arg-type]
        task = bar.add_task("experts", total=None, layers="")

        def show(step: Step) -> None:
            layers = f"{step.layers}/{step.of_layers}"
            bar.update(task, description=step.prefix or "experts", layers=layers, total=step.of_bytes)
            bar.update(task, completed=step.nbytes, refresh=True)

        yield show


def _fail(parser: argparse.ArgumentParser, error: BaseException | str, status: int) -> int:
    sys.stderr.write(f"{parser.prog}: {error}\n")
    return status
