"""Packed experts kept between starts: packed once, and from then on mapped as they lie on disk.

One folder for each source of weights, one file for each layer and format, as `kt convert` writes them. The folder's
name says what the source is, and a digest in which state: the checkpoint's files by size and time of change, what their
headers hold, the dtype asked for, and the versions of all that turns them into packed bytes. What does not fit that
exactly is packed anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import transformers

import kt_kernel
from kt_kernel import _ext, environment
from kt_kernel.packed_file import Source, is_packed, open_packed
from ktransformers.injection.placing import hide_tensors
from ktransformers.injection.slot import Slot
from ktransformers.log import get_logger

__all__ = ["Identified", "PackedCache", "cache_folder", "open_cache"]

log = get_logger("cache")

_FREE = 1 << 30
"""Bytes that are left free on the disk."""
_OWN = ".writing-"
"""Begins the name of a file that is one process's own until it is whole."""
_ABANDONED = 3600
"""Seconds without a write after which nobody is at a half-written file any more: one layer takes seconds."""


@runtime_checkable
class Identified(Protocol):
    """A source of weights whose packed experts may be kept."""

    @property
    def place(self) -> Path:
        """The folder or file the weights come from."""
        ...

    def identity(self) -> tuple[Sequence[Source], Mapping[str, Any]]:
        """The files the weights come from, and plain data on everything else that decides which numbers they are."""
        ...


def cache_folder() -> Path:
    """KT_CACHE_DIR, else `ktransformers` in XDG_CACHE_HOME or ~/.cache."""
    own = environment.CACHE_DIR.get()
    if own is not None:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "ktransformers"


def open_cache(where: bool | str | os.PathLike[str], source: object, name: str | None) -> PackedCache | None:
    """The cache of the model that `source` reads, in the usual folder (True) or that one; None without a cache, or for
    a source that does not say what it is.

    `name`: of the model, a path or an id; transformers has none for weights that it was handed.
    """
    if where is False or not isinstance(source, Identified):
        return None
    sources, identity = source.identity()
    if not name or name == "None":
        name = str(source.place)
    return PackedCache(cache_folder() if where is True else Path(where), Path(name).name, sources, identity)


class PackedCache:
    """The cached experts of one model. Nothing here keeps a model from loading: what goes wrong is one line in the log,
    and the experts are packed as without a cache.
    """

    def __init__(self, root: Path, name: str, sources: Sequence[Source], identity: Mapping[str, Any]) -> None:
        """`root`: of all models' folders. `name`: of the model, for people. `identity`: plain data on which the packed
        bytes depend, besides `sources`.
        """
        versions = [kt_kernel.__version__, _ext.LAYOUT_VERSION, transformers.__version__]
        text = json.dumps([[vars(source) for source in sources], dict(identity), versions], sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.root = root / "experts"
        self.folder = self.root / f"{_plain(name)}-{digest}"
        self._sources = tuple(sources)
        self._paths: dict[str, Path] = {}
        """Of operators that were not here and are to be kept."""
        self._writes = True
        self._unfinished: Future[None] | None = None
        self._maps = environment.CACHE_MAP.get()

    @staticmethod
    def takes(slot: Slot) -> bool:
        """Whether what an operator packs is kept at all."""
        return _wrapper(slot) is not None

    def load(self, slot: Slot) -> bool:
        """Loads an operator from its file; False where there is none that fits."""
        wrapper = _wrapper(slot)
        if wrapper is None:
            return False
        # Backend auto takes the numbers of a quantised source on their own grid, so the source decides the format.
        auto = wrapper.backend == "auto"
        kind = "auto" if auto else f"{wrapper.format}{'-rotated' if wrapper.rotated else ''}"
        path = self._paths[slot.name] = self.folder / f"{_plain(slot.name)}.{kind}.safetensors"
        try:
            if not path.is_file():
                return False
            layer = open_packed(path) if is_packed(path) else None
            if layer is None or layer.prefix != slot.name or layer.sources != self._sources:
                log.warning("%s is not what this model's cache holds: %s is packed anew", path, slot.name)
                return False
            wrapper.load_weights(path, slot.name, mapped=True, own_grid=auto)
            if not self._stays_mapped(path, wrapper):
                wrapper.load_weights(path, slot.name, own_grid=auto)
        except (OSError, kt_kernel.WeightsError) as error:
            if not wrapper.loaded:
                log.warning("%s is packed anew: %s", slot.name, error)
                return False
            log.warning("%s stays on its mapped file: %s", slot.name, error)
        hide_tensors(slot)
        slot.freed = True  # its floats were never here
        with suppress(OSError):  # another user's, or a file system that is only read
            os.utime(self.folder)  # used now: evicted last
        del self._paths[slot.name]
        return True

    def _stays_mapped(self, path: Path, wrapper: kt_kernel.MoEWrapper) -> bool:
        """What KT_CACHE_MAP says, else whether this host maps the first file in huge pages."""
        if self._maps is None:
            wrapper.warm_up()
            self._maps = _in_huge_pages(path)
        return self._maps

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around calls of `keep`: a file is written while the next operator packs, and at the end all are."""
        with ThreadPoolExecutor(1, "kt-cache") as self._writer:
            try:
                yield
            finally:
                self._finish()

    def keep(self, slot: Slot) -> None:
        """Writes what an operator packed, unless there is no room for it and as much for each still to come."""
        self._finish()  # how much room there is can be told only then
        wrapper = _wrapper(slot)
        if wrapper is None or not self._writes:
            return
        path = self._paths.pop(slot.name)
        self._unfinished = self._writer.submit(self._write, wrapper, slot.name, path)

    def _finish(self) -> None:
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None:
            unfinished.result()

    def _write(self, wrapper: kt_kernel.MoEWrapper, name: str, path: Path) -> None:
        # Another process may write the same file: each has a name of its own until it is whole.
        own = path.with_name(f"{_OWN}{os.getpid()}-{path.name}")
        try:
            if not self._has_room(wrapper.nbytes * (len(self._paths) + 1)):
                self._writes = False
                return
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_abandoned()
            wrapper.save_packed(own, name, self._sources)
            own.replace(path)
        except OSError as error:
            self._writes = False
            log.warning("packed experts are not kept for the next start: %s", error)

    def _remove_abandoned(self) -> None:
        """What a process left that was killed while it wrote, or before it gave the file its name."""
        before = time.time() - _ABANDONED
        for unfinished in self.folder.glob(f"{_OWN}*"):
            with suppress(OSError):  # another process may have removed it
                if unfinished.stat().st_mtime < before:
                    unfinished.unlink()

    def _has_room(self, needed: int) -> bool:
        """Makes room below the limit by removing other models, those first that were not used for longest."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        disk = shutil.disk_usage(self.root)
        limit = environment.CACHE_LIMIT.get()
        limit = disk.total // 2 if limit is None else limit
        own = _size(self.folder)
        others = sorted((f for f in self.root.iterdir() if f.is_dir() and f != self.folder), key=_last_used)
        taken = {folder: _size(folder) for folder in others}
        if own + needed > limit or needed > disk.free + sum(taken.values()) - _FREE:
            log.warning(
                "packed experts are not kept for the next start: they take %s, and %s may hold %s (KT_CACHE_LIMIT) "
                "with %s free on the disk",
                _readable(own + needed),
                self.root,
                _readable(limit),
                _readable(disk.free),
            )
            return False
        free = disk.free
        while taken and (own + sum(taken.values()) + needed > limit or needed > free - _FREE):
            folder, size = next(iter(taken.items()))
            log.info("%s (%s) is removed to make room for %s", folder.name, _readable(size), self.folder.name)
            shutil.rmtree(folder, ignore_errors=True)
            free += taken.pop(folder)
        return True


def _in_huge_pages(path: Path) -> bool:
    """Whether most of what this process has mapped of a file, and touched, is in huge pages. Where the system does not
    tell, it is not.
    """
    pages = {"Rss": 0, "FilePmdMapped": 0}
    inside = False
    with suppress(OSError, ValueError), Path("/proc/self/smaps").open(encoding="utf-8", errors="replace") as smaps:
        for line in smaps:
            name, colon, value = line.partition(":")
            if not colon or "-" in name:  # `7f00-7f80 r--s 00000000 fe:00 123 /path`: a mapping begins
                inside = line.rstrip("\n").endswith(f" {path.resolve()}")
            elif inside and name in pages:
                pages[name] += int(value.split()[0])
    return pages["FilePmdMapped"] > pages["Rss"] / 2


def _wrapper(slot: Slot) -> kt_kernel.MoEWrapper | None:
    """What packs alone for an operator, where it has that."""
    wrapper = getattr(slot.operator, "packed_in", None)
    assert wrapper is None or isinstance(wrapper, kt_kernel.MoEWrapper)
    return wrapper


def _plain(name: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name).lstrip(".") or "model"


def _size(folder: Path) -> int:
    total = 0
    for file in folder.glob("*"):
        with suppress(OSError):  # another process may have removed it
            total += file.stat().st_size
    return total


def _last_used(folder: Path) -> float:
    with suppress(OSError):
        return folder.stat().st_mtime
    return 0.0


def _readable(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
