"""Packed experts kept between starts: equal bits, read from nowhere else, and never one that does not fit."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kt_kernel.packed_file import open_packed
from ktransformers import KTransformer
from ktransformers.checkpoints import CheckpointSource
from ktransformers.loading.cache import cache_folder
from ktransformers.operators.experts import KTransformersExperts
from ktransformers.operators.experts_cpu import KExpertsCPU
from tests import models
from tests.checkpoints.folders import make_checkpoint
from tests.checkpoints.gguf.writer import Wish, write_gguf
from tests.checkpoints.quantised import CONFIGS, make_pair

IDS = torch.arange(20).view(1, 20)


def _rules(backend: str) -> list[dict[str, Any]]:
    return [
        {"match": {"name": r"\.experts$"}, "replace": {"class": "KTransformersExperts", "kwargs": {"backend": backend}}}
    ]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "tiny-moe")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of modules whose floats were read from the checkpoint."""
    names: list[str] = []
    modules = CheckpointSource.modules

    def spied(self: CheckpointSource, wanted: Any) -> Any:
        names.extend(wanted)
        return modules(self, wanted)

    monkeypatch.setattr(CheckpointSource, "modules", spied)
    return names


def _load(checkpoint: Path, cache: Path | bool, backend: str = "INT8", **options: Any) -> torch.Tensor:
    model = KTransformer.from_pretrained(checkpoint, _rules(backend), cache=cache, **options)
    with torch.inference_mode():
        logits: torch.Tensor = model.model(IDS).logits
    return logits


def _files(cache: Path) -> list[Path]:
    return sorted(cache.glob("experts/*/*"))


@pytest.mark.parametrize("backend", ["INT8", "BF16"])
@pytest.mark.parametrize("mapped", ["ON", "OFF", ""])
def test_the_second_start_reads_no_expert_and_computes_the_same(
    checkpoint: Path, cache: Path, read: list[str], backend: str, mapped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_CACHE_MAP", mapped)
    without = _load(checkpoint, False, backend)
    read.clear()
    assert torch.equal(_load(checkpoint, cache, backend), without)
    assert len(read) == len(_files(cache)) == 2
    read.clear()
    assert torch.equal(_load(checkpoint, cache, backend), without)
    assert read == []


def test_experts_are_mapped_not_copied(checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_CACHE_MAP", "ON")
    _load(checkpoint, cache)
    model = KTransformer.from_pretrained(checkpoint, _rules("INT8"), cache=cache)
    operators = [m for m in model.model.modules() if isinstance(m, KTransformersExperts)]
    wrappers = [operator.packed_in for operator in operators]
    assert [wrapper._packed.mapped for wrapper in wrappers if wrapper and wrapper._packed] == [True, True]
    maps = Path("/proc/self/maps").read_text()
    assert all(str(path) in maps for path in _files(cache))
    for path in _files(cache):  # what evicting does while a process runs on them
        path.unlink()
    with torch.inference_mode():
        assert model.model(IDS).logits.isfinite().all()


def test_formats_and_rotation_have_files_of_their_own(checkpoint: Path, cache: Path) -> None:
    _load(checkpoint, cache, "INT8")
    _load(checkpoint, cache, "BF16")
    rules = _rules("INT8")
    rules[0]["replace"]["kwargs"]["rotate"] = False
    KTransformer.from_pretrained(checkpoint, rules, cache=cache)
    assert len(_files(cache)) == 6
    assert len(list(cache.glob("experts/*"))) == 1


def test_backends_of_one_format_share_theirs(checkpoint: Path, cache: Path) -> None:
    assert torch.equal(_load(checkpoint, cache, "AMXINT8"), _load(checkpoint, cache, "AVX2INT8"))
    assert len(_files(cache)) == 2


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _damage_the_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])


def _put_another_layer_there(path: Path) -> None:
    other = next(file for file in path.parent.iterdir() if file != path)
    path.write_bytes(other.read_bytes())


def _change_the_layout_version(path: Path) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"]["layout"] = "1"
    text = json.dumps(header).encode().ljust(length)
    path.write_bytes(content[:8] + text + content[8 + length :])


@pytest.mark.parametrize("spoil", [_truncate, _damage_the_header, _put_another_layer_there, _change_the_layout_version])
def test_a_file_that_does_not_fit_is_packed_anew_with_one_line(
    checkpoint: Path, cache: Path, read: list[str], said: Callable[[], list[str]], spoil: Callable[[Path], None]
) -> None:
    wanted = _load(checkpoint, cache)
    spoil(_files(cache)[0])
    read.clear()
    assert torch.equal(_load(checkpoint, cache), wanted)
    assert read == ["model.layers.1.mlp.experts"]
    (line,) = said()
    assert "model.layers.1.mlp.experts is packed anew" in line
    read.clear()
    assert torch.equal(_load(checkpoint, cache), wanted)
    assert read == []


def test_files_of_another_checkpoint_of_the_same_sizes_are_packed_anew(
    checkpoint: Path, tmp_path: Path, cache: Path, said: Callable[[], list[str]]
) -> None:
    wanted = _load(checkpoint, cache)
    ours = _files(cache)
    _load(make_checkpoint(tmp_path / "other", seed=1), cache)
    theirs = [file for file in _files(cache) if file not in ours]
    for own, foreign in zip(ours, theirs, strict=True):
        assert own.name == foreign.name
        own.write_bytes(foreign.read_bytes())
    assert torch.equal(_load(checkpoint, cache), wanted)
    assert ["is packed anew" in line for line in said()] == [True, True]


def test_a_changed_checkpoint_is_another_one(checkpoint: Path, cache: Path, read: list[str]) -> None:
    _load(checkpoint, cache)
    path = checkpoint / "model.safetensors"
    before = path.stat()
    tensors = load_file(path)
    changed = {name: tensor * 2 if ".experts." in name else tensor for name, tensor in tensors.items()}
    save_file(changed, path, metadata={"format": "pt"})
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    wanted = _load(checkpoint, False)
    read.clear()
    assert torch.equal(_load(checkpoint, cache), wanted)
    assert len(read) == 2


@pytest.mark.parametrize("backend", ["INT8", "auto"])
def test_gguf_files_have_a_cache_too(
    tmp_path: Path, cache: Path, read: list[str], said: Callable[[], list[str]], backend: str
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(models.make_qwen3_moe(mlp_only_layers=[]), path, Wish({"": "F32", "exps": "Q4_0"}))
    without = _load(path, False, backend)
    before = said()
    assert torch.equal(_load(path, cache, backend), without)
    assert len(_files(cache)) == 3
    for file in _files(cache):
        os.utime(file, ns=(0, 0))
    assert torch.equal(_load(path, cache, backend), without)
    assert said() == before
    assert {open_packed(file).formats.name for file in _files(cache)} == {"INT4" if backend == "auto" else "INT8"}
    assert all(file.stat().st_mtime_ns == 0 for file in _files(cache))  # read, not written again
    assert read == []  # nor is there another checkpoint


def test_another_dtype_is_another_source(checkpoint: Path, cache: Path, read: list[str]) -> None:
    _load(checkpoint, cache)
    read.clear()
    _load(checkpoint, cache, dtype=torch.bfloat16)
    assert len(read) == 2


def test_a_place_that_cannot_be_written_is_one_line(
    checkpoint: Path, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    (tmp_path / "file").write_text("no folder")
    assert torch.equal(_load(checkpoint, tmp_path / "file"), _load(checkpoint, False))
    (line,) = said()
    assert "are not kept for the next start" in line


def test_a_cache_that_is_only_read_serves_what_it_has(
    checkpoint: Path, cache: Path, said: Callable[[], list[str]], read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = _load(checkpoint, cache)
    _files(cache)[0].unlink()
    read.clear()

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    opened = Path.open

    def only_read(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
        return opened(path, mode, *rest, **options) if "r" in mode and "+" not in mode else refuse()

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "open", only_read)
    assert torch.equal(_load(checkpoint, cache), wanted)
    assert len(read) == 1  # the other layer is there
    (line,) = said()
    assert "are not kept for the next start" in line
    assert "Read-only file system" in line


def test_a_disk_that_is_full_half_way_is_one_line_and_leaves_nothing_half(
    checkpoint: Path, cache: Path, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert torch.equal(_load(checkpoint, cache), _load(checkpoint, False))
    (line,) = said()
    assert "No space left on device" in line
    assert _files(cache) == []


def test_a_layer_is_written_while_the_next_one_packs(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing = threading.Semaphore(0)
    load, sync = KExpertsCPU.load_from, os.fsync

    def load_from(*arguments: Any) -> None:
        packing.release()
        load(*arguments)

    def fsync(descriptor: int) -> None:
        if len(_files(cache)) == 1:  # the first: packing it let one through, this waits for the second
            assert packing.acquire(timeout=60)
            assert packing.acquire(timeout=60), "nothing packs while the first layer is written"
        sync(descriptor)

    monkeypatch.setattr(KExpertsCPU, "load_from", load_from)
    monkeypatch.setattr(os, "fsync", fsync)
    _load(checkpoint, cache)
    assert len(_files(cache)) == 2
    assert not any(file.name.startswith(".writing-") for file in _files(cache))


def test_the_limit_removes_what_was_not_used_for_longest(
    tmp_path: Path, cache: Path, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [make_checkpoint(tmp_path / f"model-{n}", models.make_qwen3_moe, seed=n) for n in range(3)]
    for age, folder in enumerate(folders[:2]):
        _load(folder, cache)
        used = next(cache.glob(f"experts/{folder.name}-*"))
        os.utime(used, (1000 + age, 1000 + age))
    _load(folders[0], cache)  # used again: the other one is older now
    size = sum(file.stat().st_size for file in _files(cache)) // 2
    monkeypatch.setenv("KT_CACHE_LIMIT", str(size * 5 // 2))
    _load(folders[2], cache)
    assert {folder.name.rpartition("-")[0] for folder in cache.glob("experts/*")} == {"model-0", "model-2"}
    monkeypatch.setenv("KT_CACHE_LIMIT", "10K")
    _load(folders[1], cache)
    (line,) = said()
    assert "KT_CACHE_LIMIT" in line
    assert {folder.name.rpartition("-")[0] for folder in cache.glob("experts/*")} == {"model-0", "model-2"}


def test_what_a_killed_process_left_half_written_goes(checkpoint: Path, cache: Path) -> None:
    KTransformer.from_pretrained(checkpoint, rules=_rules("INT8"), cache=cache)
    (folder,) = (cache / "experts").iterdir()
    half, whole, written_now = (folder / f".writing-{n}" for n in ("1-a.partial", "1-a", "2-a.partial"))
    for file in (half, whole, written_now):
        file.write_bytes(b"half")
    for file in (half, whole):
        os.utime(file, (0, 0))
    KTransformer.from_pretrained(checkpoint, rules=_rules("BF16"), cache=cache)
    assert not half.exists()
    assert not whole.exists()
    assert written_now.exists()


_KILLED = """
import os, signal, sys
from ktransformers import KTransformer
synced = 0
def sync(descriptor):  # the second layer is written and has no name yet
    global synced
    synced += 1
    if synced == 2:
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = sync
replace = {"class": "KTransformersExperts", "kwargs": {"backend": "INT8"}}
KTransformer.from_pretrained(sys.argv[1], [{"match": {"name": r"\\.experts$"}, "replace": replace}], cache=sys.argv[2])
"""


def test_a_loader_that_is_killed_leaves_a_cache_that_serves_what_is_whole(
    checkpoint: Path, cache: Path, read: list[str], said: Callable[[], list[str]]
) -> None:
    command = [sys.executable, "-c", _KILLED, str(checkpoint), str(cache)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == -signal.SIGKILL, run.stderr
    first, unfinished = sorted(_files(cache), key=lambda file: file.name.startswith(".writing-"))
    assert unfinished.name.startswith(".writing-")
    read.clear()
    with_cache = _load(checkpoint, cache)
    assert len(read) == 1  # the other layer was whole
    assert said() == []
    assert torch.equal(with_cache, _load(checkpoint, False))
    assert first in _files(cache)
    assert len([file for file in _files(cache) if not file.name.startswith(".writing-")]) == 2


def test_kept_floats_are_read_and_nothing_is_cached(checkpoint: Path, cache: Path) -> None:
    KTransformer.from_pretrained(checkpoint, _rules("INT8"), cache=cache, keep_float=True)
    assert not cache.exists()


def test_the_usual_place_is_the_user_s_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "ktransformers"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "ktransformers"
    monkeypatch.setenv("KT_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_a_cached_file_is_one_that_the_wrapper_loads(checkpoint: Path, cache: Path) -> None:
    _load(checkpoint, cache)
    layer = open_packed(_files(cache)[0])
    assert layer.prefix == "model.layers.1.mlp.experts"
    assert [source.name for source in layer.sources] == ["model.safetensors"]


@pytest.mark.parametrize("method", CONFIGS)
def test_a_quantised_checkpoint_is_the_same_source_at_the_next_start(tmp_path: Path, cache: Path, method: str) -> None:
    quantised, _ = make_pair(tmp_path, method)
    started = []  # the first model lives on: nothing of the second has the address of what it was before
    for there in (0, 2):
        started.append(KTransformer.from_pretrained(quantised, _rules("auto"), cache=cache))
        (folder,) = cache.glob("experts/*")
        assert folder.name.startswith(f"{method}-")
        assert f"{there} of 2 layers" in started[-1].model.hf_quantizer.cache_note


def test_linears_take_no_room_from_experts(checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _load(checkpoint, cache, "auto")
    size = sum(file.stat().st_size for file in _files(cache))
    shutil.rmtree(cache)
    monkeypatch.setenv("KT_CACHE_LIMIT", str(size + 4096))
    for there in (0, 2):
        model = KTransformer.from_pretrained(checkpoint, "cpu-only", cache=cache)
        assert f"{there} of 2 layers" in model.model.hf_quantizer.cache_note  # linears are packed each time
    assert len(_files(cache)) == 2
