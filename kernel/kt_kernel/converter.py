"""Converts a checkpoint's experts to packed files, layer by layer, so that loading them later is only reading.

Every layer is checked before the first is written. A run that was cut short goes on where it stopped: files that are
whole and of the same source stay as they are.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kt_kernel import _ext
from kt_kernel.backends import AUTO, BACKENDS, Backend, parse_backend
from kt_kernel.checkpoint import open_path
from kt_kernel.contexts import resolve_threads, shared_context
from kt_kernel.convertible import Convertible, find_convertible
from kt_kernel.errors import BackendError, WeightsError
from kt_kernel.folder_lock import alone_in
from kt_kernel.model_config import ModelConfig
from kt_kernel.packed_file import PARTIAL, PackedLayer, is_packed, open_packed, save_packed
from kt_kernel.tier import choose_tier

__all__ = ["MANIFEST", "METHODS", "Progress", "Report", "Step", "convert", "parse_method"]

logger = logging.getLogger("kt_kernel")

METHODS = ("AMXINT8", "AMXINT4", "AMXBF16", "FP8", "auto")
MANIFEST = "kt_manifest.json"
"""Written last: a folder with it is complete."""
# What a model needs beside its weights, where the checkpoint has it.
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
)


@dataclass(frozen=True)
class Step:
    """Where a run is: the prefix of the layer that starts, empty at the end; layers and bytes of packed files, those
    done and all there are. What an earlier run wrote is done.
    """

    prefix: str
    layers: int
    of_layers: int
    nbytes: int
    of_bytes: int


Progress = Callable[[Step], None]


@dataclass(frozen=True)
class Report:
    """What a run did. `written` and `kept` are names of files in `output`."""

    output: Path
    written: tuple[str, ...]
    kept: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, eq=False)
class _Job:
    """One layer, and the file it becomes."""

    layer: Convertible
    path: Path

    @property
    def packed(self) -> PackedLayer:
        return self.layer.packed

    @property
    def done(self) -> bool:
        """Whether the file is there, whole, and of this very source."""
        if not self.path.is_file() or not is_packed(self.path):
            return False
        try:
            return self.layer.is_in(open_packed(self.path))
        except WeightsError:
            return False


def parse_method(name: str) -> Backend:
    """One of `METHODS`, in any case. Raises `BackendError` for every other backend."""
    backend = parse_backend(name)
    if backend.name not in METHODS:
        raise BackendError(
            f"method {name!r}: weights are converted with {', '.join(METHODS)}, whose files run on every CPU"
        )
    return backend


def convert(
    source: Path,
    output: Path,
    method: str,
    *,
    threads: int | None = None,
    rotate: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Packs the experts of every layer in `source`, a `.safetensors` file, index or folder, into the folder `output`.

    Raises:
        BackendError, ConfigError: the method, or `threads`.
        WeightsError: no experts, damaged or unusable weights, a folder that holds something else or that another run
            writes into.
        OSError: the disk has too little room (said before anything is written), or a file cannot be written.
    """
    backend = parse_method(method)
    count = resolve_threads(threads)
    source, output = source.expanduser(), output.expanduser()
    _check_output(source, output)
    with ExitStack() as stack:
        if there := output.is_dir():
            stack.enter_context(alone_in(output))
        entries = open_path(source, stack)
        layers = find_convertible(entries, str(source), ModelConfig.read(source), backend, rotate)
        jobs = [_Job(layer, output / f"{_file_name(layer.packed.prefix)}.safetensors") for layer in layers]
        _check_jobs(jobs, output)
        for job in jobs:  # what a run that was killed left
            job.path.with_name(job.path.name + PARTIAL).unlink(missing_ok=True)
        todo = [job for job in jobs if not job.done]
        _check_room(todo, output)
        output.mkdir(parents=True, exist_ok=True)
        if not there:
            stack.enter_context(alone_in(output))
        if todo:
            (output / MANIFEST).unlink(missing_ok=True)
        context = shared_context(count)
        # The bytes are the same on every tier; asking for the bare format takes the best without a word about AMX.
        tier = choose_tier(BACKENDS[backend.format]).tier
        _say_second(jobs, backend)
        steps = _steps(jobs, todo)
        for job in todo:
            if progress is not None:
                progress(next(steps))
            packed = job.layer.pack(context, tier)
            save_packed(job.path, packed, job.packed.prefix, job.packed.sources)
            del packed  # before the next layer takes its memory
        if progress is not None:
            progress(next(steps))
        if source.is_dir():
            _copy_companions(source, output)
        nbytes = _write_manifest(jobs, backend, output)
    written = tuple(job.path.name for job in todo)
    kept = tuple(job.path.name for job in jobs if job not in todo)
    return Report(output, written, kept, nbytes)


def _steps(jobs: Sequence[_Job], todo: Sequence[_Job]) -> Iterator[Step]:
    """The beginning of each of `todo`, and the end."""
    total = sum(job.packed.file_size for job in jobs)
    layers, nbytes = len(jobs) - len(todo), total - sum(job.packed.file_size for job in todo)
    for job in todo:
        yield Step(job.packed.prefix, layers, len(jobs), nbytes, total)
        layers, nbytes = layers + 1, nbytes + job.packed.file_size
    yield Step("", layers, len(jobs), nbytes, total)


def _say_second(jobs: Sequence[_Job], backend: Backend) -> None:
    if second := sum(job.layer.second for job in jobs):
        becomes = "decoded to" if backend.format == "BF16" else "quantised a second time, to"
        why = "whose layers have float weights too" if backend == AUTO else "method auto keeps their own numbers"
        logger.warning(
            "%s: the checkpoint's quantised experts are %s %s in %d of %d layer(s); %s",
            backend.name,
            becomes,
            backend.format,
            second,
            len(jobs),
            why,
        )


def _check_output(source: Path, output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise WeightsError(f"output {output} is a file; pass a folder, which is made if it is not there")
    folder = source if source.is_dir() else source.parent
    if output.exists() and folder.exists() and output.samefile(folder):
        raise WeightsError(f"output {output} is the folder of the checkpoint itself; pass another one")


def _file_name(prefix: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", prefix) or "experts"


def _check_jobs(jobs: Sequence[_Job], output: Path) -> None:
    """Every file is one layer's, and nothing else lies in the folder."""
    by_file: dict[str, str] = {}
    for job in jobs:
        other = by_file.setdefault(job.path.name, job.packed.prefix)
        if other != job.packed.prefix:
            raise WeightsError(f"{other!r} and {job.packed.prefix!r} would both become {job.path.name}: rename one")
    there = sorted(output.glob("*.safetensors"))
    if foreign := [file.name for file in there if file.name not in by_file or not is_packed(file)]:
        raise WeightsError(
            f"output {output} holds files that this conversion does not write ({', '.join(foreign[:5])}): pass another "
            "folder, or remove them"
        )


def _check_room(todo: Sequence[_Job], output: Path) -> None:
    needed = sum(job.packed.file_size for job in todo)
    # A file that is written again stays until its successor is whole, so what it takes is no room.
    existing = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise OSError(
            f"{output} needs {needed / 2**30:.2f} GiB ({needed} bytes) for {len(todo)} layer(s), and the disk has "
            f"{free / 2**30:.2f} GiB free: make room, or pass a folder on another disk"
        )


def _copy_companions(source: Path, output: Path) -> None:
    for pattern in _COMPANIONS:
        for file in sorted(source.glob(pattern)):
            if file.is_file() and file.suffix != ".safetensors":
                target = output / file.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)


def _write_manifest(jobs: Sequence[_Job], backend: Backend, output: Path) -> int:
    """The bytes of all packed files together."""
    written = [(job.path.name, open_packed(job.path)) for job in jobs]
    layers = [
        {"prefix": layer.prefix, "file": name, "bytes": layer.file_size, "experts": layer.experts}
        for name, layer in written
    ]
    manifest = {
        "method": backend.name,
        "formats": sorted({layer.formats.name for _, layer in written}),
        "rotated": any(layer.rotated for _, layer in written),
        "layout": _ext.LAYOUT_VERSION,
        "layers": layers,
    }
    partial = output / (MANIFEST + PARTIAL)
    partial.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    partial.replace(output / MANIFEST)
    return sum(layer.file_size for _, layer in written)
