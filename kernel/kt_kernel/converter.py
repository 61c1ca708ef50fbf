"""Converts a float checkpoint's experts to packed files, layer by layer, so that loading them later is only reading.

Every layer is checked before the first is written. A run that was cut short goes on where it stopped: files that are
whole and of the same source stay as they are.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_kernel import _ext
from kt_kernel.backends import BACKENDS, Backend, parse_backend
from kt_kernel.checkpoint import open_path
from kt_kernel.config import MoEConfig
from kt_kernel.contexts import resolve_threads, shared_context
from kt_kernel.errors import BackendError, ConfigError, WeightsError
from kt_kernel.layer_check import check_layer
from kt_kernel.layer_formats import LayerFormats
from kt_kernel.naming import BIAS, Layer, find_layers
from kt_kernel.packed_file import PARTIAL, PackedLayer, Source, is_packed, open_packed, save_packed
from kt_kernel.tier import choose_tier
from kt_kernel.weights import ExpertWeights, pack

__all__ = ["MANIFEST", "METHODS", "Progress", "Report", "convert", "parse_method"]

METHODS = ("AMXINT8", "AMXINT4", "AMXBF16", "FP8")
MANIFEST = "kt_manifest.json"
"""Written last: a folder with it is complete."""
Progress = Callable[[str, int, int], None]
"""Told the prefix of the layer that starts, how many are done, and how many there are."""
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
class Report:
    """What a run did. `written` and `kept` are names of files in `output`."""

    output: Path
    written: tuple[str, ...]
    kept: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class _Job:
    """One layer, the file it becomes, and what will stand in that file."""

    weights: ExpertWeights
    packed: PackedLayer
    path: Path

    @property
    def done(self) -> bool:
        """Whether the file is there, whole, and of this very source."""
        if not self.path.is_file() or not is_packed(self.path):
            return False
        try:
            return open_packed(self.path) == self.packed
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
        WeightsError: no experts, damaged or unusable weights, a folder that holds something else.
        OSError: the disk has too little room (said before anything is written), or a file cannot be written.
    """
    backend = parse_method(method)
    count = resolve_threads(threads)
    source, output = source.expanduser(), output.expanduser()
    _check_output(source, output)
    with ExitStack() as stack:
        entries = open_path(source, stack)
        layers = find_layers(entries, str(source))
        jobs = [_job(layer, output, backend, rotate) for layer in layers]
        _check_jobs(jobs, source, output)
        for job in jobs:  # what a run that was killed left
            job.path.with_name(job.path.name + PARTIAL).unlink(missing_ok=True)
        todo = [job for job in jobs if not job.done]
        _check_room(todo, output)
        output.mkdir(parents=True, exist_ok=True)
        if todo:
            (output / MANIFEST).unlink(missing_ok=True)
        context = shared_context(count)
        # The bytes are the same on every tier; asking for the bare format takes the best without a word about AMX.
        tier = choose_tier(BACKENDS[backend.format]).tier
        for index, job in enumerate(todo):
            if progress is not None:
                progress(job.packed.prefix, len(jobs) - len(todo) + index, len(jobs))
            packed = pack(job.weights, context, tier, job.packed.formats, job.packed.rotated)
            save_packed(job.path, packed, job.packed.prefix, job.packed.sources)
    if progress is not None:
        progress("", len(jobs), len(jobs))
    if source.is_dir():
        _copy_companions(source, output)
    _write_manifest(jobs, backend, output)
    written = tuple(job.path.name for job in todo)
    kept = tuple(job.path.name for job in jobs if job not in todo)
    return Report(output, written, kept, sum(job.packed.file_size for job in jobs))


def _check_output(source: Path, output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise WeightsError(f"output {output} is a file; pass a folder, which is made if it is not there")
    folder = source if source.is_dir() else source.parent
    if output.exists() and folder.exists() and output.samefile(folder):
        raise WeightsError(f"output {output} is the folder of the checkpoint itself; pass another one")


def _job(layer: Layer, output: Path, backend: Backend, rotate: bool) -> _Job:
    gated = any(projection.removesuffix(BIAS) in ("gate", "gate_up") for projection in _projections(layer))
    config = _config(layer)
    try:
        config.check_format(backend.format)
    except ConfigError as error:
        raise WeightsError(f"{layer.label}: {error}") from error
    weights = ExpertWeights(layer, config, check_layer(layer, config, gated), gated)
    files = sorted({entry.where for entry in (*layer.stacked.values(), *layer.single.values())})
    # One expert is enough to know the bytes of all.
    formats = LayerFormats.both(backend.format)
    sizes = 1, config.hidden_size, config.intermediate_size
    one = formats.allocate(*sizes, rotate=rotate, gated=gated, biased=weights.biased)
    packed = PackedLayer(
        layer.prefix,
        config.expert_num,
        config.hidden_size,
        config.intermediate_size,
        formats,
        one.rotated,
        gated,
        weights.biased,
        one.bytes_per_expert,
        tuple(Source.of(Path(file)) for file in files),
    )
    return _Job(weights, packed, output / f"{_file_name(layer.prefix)}.safetensors")


def _projections(layer: Layer) -> set[str]:
    return {*layer.stacked, *(projection for projection, _ in layer.single)}


def _config(layer: Layer) -> MoEConfig:
    """The layer's sizes, as its down projection has them: (E, H, I), or (H, I) for each expert."""
    stacked = layer.stacked.get("down")
    singles = [(expert, entry) for (projection, expert), entry in layer.single.items() if projection == "down"]
    if stacked is not None and len(stacked.shape) == 3:
        experts, hidden, intermediate = stacked.shape
    elif singles and len(singles[0][1].shape) == 2:
        experts = 1 + max(expert for _, expert in layer.single)
        hidden, intermediate = singles[0][1].shape
    else:
        raise WeightsError(f"{layer.label}: no down projection (experts, hidden, intermediate) to take the sizes from")
    sizes = {"expert_num": experts, "hidden_size": hidden, "intermediate_size": intermediate}
    return MoEConfig.from_dict({**sizes, "max_len": 1, "num_experts_per_tok": 1})


def _file_name(prefix: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", prefix) or "experts"


def _check_jobs(jobs: Sequence[_Job], source: Path, output: Path) -> None:
    """Every file is one layer's, every layer fits the checkpoint's config, and nothing else lies in the folder."""
    by_file: dict[str, str] = {}
    for job in jobs:
        other = by_file.setdefault(job.path.name, job.packed.prefix)
        if other != job.packed.prefix:
            raise WeightsError(f"{other!r} and {job.packed.prefix!r} would both become {job.path.name}: rename one")
    hidden = _hidden_size(source)
    for job in jobs:
        if hidden is not None and job.packed.hidden != hidden:
            raise WeightsError(
                f"{job.packed.prefix}: down_proj has {job.packed.hidden} outputs, and config.json's hidden_size is "
                f"{hidden}; experts that are saved transposed are not converted"
            )
    there = sorted(output.glob("*.safetensors"))
    if foreign := [file.name for file in there if file.name not in by_file or not is_packed(file)]:
        raise WeightsError(
            f"output {output} holds files that this conversion does not write ({', '.join(foreign[:5])}): pass another "
            "folder, or remove them"
        )


def _hidden_size(source: Path) -> int | None:
    """What config.json says, where there is one that says it."""
    try:
        config: Any = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        hidden = config.get("hidden_size")
    except (OSError, ValueError, AttributeError):
        return None
    return hidden if isinstance(hidden, int) else None


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


def _write_manifest(jobs: Sequence[_Job], backend: Backend, output: Path) -> None:
    layers = [
        {
            "prefix": job.packed.prefix,
            "file": job.path.name,
            "bytes": job.packed.file_size,
            "experts": job.packed.experts,
        }
        for job in jobs
    ]
    manifest = {
        "method": backend.name,
        "format": backend.format,
        "rotated": jobs[0].packed.rotated,
        "layout": _ext.LAYOUT_VERSION,
        "layers": layers,
    }
    partial = output / (MANIFEST + PARTIAL)
    partial.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    partial.replace(output / MANIFEST)
