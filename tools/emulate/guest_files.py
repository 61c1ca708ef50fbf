"""The guest's files as an initial RAM disk (cpio, "newc" format)."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path

from tools.emulate.errors import EmulationFailed

DIRECTORY = stat.S_IFDIR | 0o755
DEVICE = stat.S_IFCHR


class RamDisk:
    """Collects files; `image` is what the kernel unpacks. Folders appear by themselves."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._count = 0
        self._folders: set[str] = set()

    def add(
        self, name: str, data: bytes = b"", mode: int = stat.S_IFREG | 0o755, device: int = 0, mtime: int = 0
    ) -> None:
        name = name.lstrip("/")
        folder = os.path.dirname(name)  # noqa: PTH120 (a path of the guest)
        if folder and folder not in self._folders:
            self.add(folder, mode=DIRECTORY)
        if mode == DIRECTORY:
            self._folders.add(name)
        self._count += 1
        path = name.encode() + b"\0"
        fields = (self._count, mode, 0, 0, 1, mtime, len(data), 0, 0, os.major(device), os.minor(device), len(path), 0)
        head = b"070701" + b"".join(b"%08x" % field for field in fields)
        self._parts += [head, path, bytes(-(len(head) + len(path)) % 4), data, bytes(-len(data) % 4)]

    def add_file(self, host: Path, name: str) -> None:
        facts = host.stat()  # the time matters to Python's .pyc files
        self.add(name, host.read_bytes(), stat.S_IFREG | stat.S_IMODE(facts.st_mode), mtime=int(facts.st_mtime))

    def add_path(self, host: Path, name: str) -> None:
        """A file, or a folder with everything in it."""
        if not host.exists():
            raise EmulationFailed(f"no file {host}")
        if host.is_file():
            return self.add_file(host, name)
        for path in sorted(host.rglob("*")):
            if path.is_file():
                self.add_file(path, f"{name}/{path.relative_to(host)}")
        return None

    def image(self) -> bytes:
        end = RamDisk()
        end.add("TRAILER!!!", mode=0)
        data = b"".join(self._parts + end._parts)
        return data + bytes(-len(data) % 512)


def libraries(program: Path) -> list[Path]:
    """The loader and the libraries of a dynamically linked program; none of a static one."""
    listing = subprocess.run(["ldd", str(program)], capture_output=True, text=True, timeout=60, check=False).stdout
    found = []
    for line in listing.splitlines():
        if "not found" in line:
            raise EmulationFailed(f"{program}: {line.strip()}")
        match = re.search(r"=> (/\S+)", line) or re.match(r"\s*(/\S+) \(", line)
        if match:
            found.append(Path(match[1]))
    return found
