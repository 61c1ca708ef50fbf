"""The prepared emulator in its cache: fetched, mended and assembled once, then used by any number of runs at once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.emulate import bochs_fix
from tools.emulate.commands import output_of, require, say
from tools.emulate.errors import NotAvailable
from tools.emulate.kernel_image import decompress, flatten, with_hook
from tools.emulate.packages import LIBRARIES, fetch

VERSION = "1"  # raise it when a change here makes older caches useless
GUEST_SOURCES = Path(__file__).parent / "guest"
# Where the boot ROM puts the initial RAM disk; the kernel has to end below.
RAMDISK_ADDRESS = 0x8000000


@dataclass(frozen=True)
class Emulator:
    """Paths inside a prepared cache."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def bochs(self) -> list[str]:
        """The command that starts Bochs under its own loader and libraries."""
        return [*_loader(self.root), str(self.root / "usr/bin/bochs-fixed")]

    @property
    def kernel(self) -> bytes:
        return (self.folder / "kernel.img").read_bytes()

    @property
    def kernel_place(self) -> tuple[int, int]:
        """Load address and entry."""
        address, entry = (self.folder / "kernel.txt").read_text().split()
        return int(address), int(entry)

    @property
    def versions(self) -> list[str]:
        return (self.folder / "stamp").read_text().splitlines()[1:]


def default_cache() -> Path:
    """KT_EMULATOR_CACHE, or a folder in the user's cache."""
    named = os.environ.get("KT_EMULATOR_CACHE")
    return Path(named).absolute() if named else Path.home() / ".cache/ktransformers/emulator"


def prepare(cache: Path) -> Emulator:
    """The emulator in `cache`, made there first if need be; NotAvailable, in one line, where it cannot be made.

    Several runs may start at once: one prepares, the others wait for it.
    """
    _check_machine()
    wanted = _stamp()
    with _locked(cache):
        stamp = cache / "stamp"
        if not stamp.exists() or stamp.read_text().splitlines()[0] != wanted:
            _make(cache, wanted)
    return Emulator(cache)


def _check_machine() -> None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NotAvailable(f"the emulator is a Linux x86-64 program, this is {platform.system()} {platform.machine()}")
    require("gcc", "objcopy")


def _stamp() -> str:
    """A hash of everything the cache is made by."""
    here = Path(__file__).parent
    parts = [here / "packages.py", here / "bochs_fix.py", here / "kernel_image.py"]
    parts += [GUEST_SOURCES / name for name in ("init.c", "rom.S", "hook.S")]
    return hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest() + " " + VERSION


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        lock = cache.with_name(cache.name + ".lock").open("w")
    except OSError as error:
        raise NotAvailable(f"the cache {cache} cannot be written: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(cache: Path, stamp: str) -> None:
    began = time.monotonic()
    new = Path(tempfile.mkdtemp(prefix="new-", dir=cache.parent))
    try:
        versions = fetch(new / "apt", new / "root")
        shutil.rmtree(new / "apt")
        _make_bochs(new / "root")
        _make_kernel(new)
        (new / "rom.bin").write_bytes(assemble("rom.S"))
        (new / "vga.bin").write_bytes(bytes(512))
        output_of(["gcc", "-O2", "-static", "-s", "-Wall", GUEST_SOURCES / "init.c", "-o", new / "init"])
        (new / "stamp").write_text("\n".join([stamp, *versions]) + "\n")
        shutil.rmtree(cache, ignore_errors=True)
        new.rename(cache)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    say(f"prepared in {time.monotonic() - began:.0f} s: {', '.join(versions)}")


def _loader(root: Path) -> list[str]:
    return [str(root / LIBRARIES / "ld-linux-x86-64.so.2"), "--library-path", str(root / LIBRARIES)]


def _make_bochs(root: Path) -> None:
    plain = root / "usr/bin/bochs-bin"
    if not plain.exists():
        raise NotAvailable("the bochs package holds no usr/bin/bochs-bin")
    missing = re.findall(r"(\S+) => not found", output_of([*_loader(root), "--list", plain]))
    if missing:
        raise NotAvailable(f"Bochs lacks {', '.join(missing)}")
    bochs_fix.fix(plain, root / "usr/bin/bochs-fixed")


def _make_kernel(new: Path) -> None:
    boot = new / "root/boot"
    found = sorted(boot.glob("vmlinuz*"))
    if not found:
        raise NotAvailable("the kernel package holds no vmlinuz")
    lz4 = [*_loader(new / "root"), str(new / "root/usr/bin/lz4")]
    image = flatten(with_hook(decompress(found[0].read_bytes(), lz4), assemble("hook.S")), RAMDISK_ADDRESS)
    (new / "kernel.img").write_bytes(image.data)
    (new / "kernel.txt").write_text(f"{image.address} {image.entry}")
    shutil.rmtree(boot)


def assemble(name: str) -> bytes:
    """The machine code of a source in guest/."""
    with tempfile.TemporaryDirectory() as folder:
        unit, code = Path(folder, "unit.o"), Path(folder, "code")
        output_of(["gcc", "-c", GUEST_SOURCES / name, "-o", unit])
        output_of(["objcopy", "-O", "binary", "-j", ".text", unit, code])
        return code.read_bytes()
