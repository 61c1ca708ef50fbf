"""What one run consists of, and the disk the boot ROM reads: the kernel, its start information, the guest's files."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from tools.emulate.emulator import RAMDISK_ADDRESS, Emulator
from tools.emulate.errors import EmulationFailed
from tools.emulate.guest_files import RamDisk, libraries

MEMORY_LIMIT_MIB = 2048  # of Bochs 3.0
START_INFO_ADDRESS = 0x7000
SECTOR = 512
CYLINDER = 16 * 63 * SECTOR
# 580: fsrm, which the guest kernel half-drops here and then breaks its own memmove. 600: amx_tile, which the kernel
# cannot manage without XFD, a thing Bochs lacks; programs see it all the same.
COMMAND_LINE = (
    "nokaslr acpi=off pci=off nolapic noapic mitigations=off tsc=reliable panic=0 idle=halt clearcpuid=580,600 "
    "quiet loglevel=0 cryptomgr.notests ipv6.disable=1 "
    "initcall_blacklist=load_system_certificate_list,load_revocation_certificate_list,"
    "init_kprobes,init_graph_tracefs,init_kprobe_trace"
)


class Tiles(Enum):
    """How the program finds the AMX tile state."""

    GRANTED = "granted"  # asked for before the program starts
    ON_REQUEST = "on request"  # XCR0 shows it, and tiles work, only once the program has asked by arch_prctl
    ABSENT = "absent"  # a CPU without AMX


@dataclass(frozen=True)
class Job:
    """A program, what it gets, and the CPU it finds."""

    program: Path
    arguments: tuple[str, ...] = ()
    model: str = "sapphire_rapids"  # as Bochs names it
    exclude: tuple[str, ...] = ()  # features the CPU lacks, as Bochs names them
    tiles: Tiles = Tiles.ABSENT
    files: tuple[tuple[Path, str], ...] = ()  # (host, guest)
    libraries_of: tuple[Path, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    memory_mib: int = 512
    fifo: bool = True  # threads change only where they block: the guest kernel does not save tiles
    seconds: float = 600


def ram_disk(emulator: Emulator, job: Job) -> bytes:
    disk = RamDisk()
    disk.add("dev/console", mode=0o20600, device=os.makedev(5, 1))
    disk.add("dev/null", mode=0o20666, device=os.makedev(1, 3))
    disk.add("init", (emulator.folder / "init").read_bytes())
    name = f"/test/{job.program.name}"
    disk.add(name, job.program.read_bytes())
    programs = [job.program, *(host for host, _ in job.files if host.is_file()), *job.libraries_of]
    for library in dict.fromkeys(library for program in programs for library in libraries(program)):
        disk.add(str(library), library.read_bytes())
    for host, place in job.files:
        disk.add_path(host, place)
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/test", "KT_EMULATED": "bochs", **job.environment}
    disk.add("emu.argv", _strings([name, *job.arguments]))
    disk.add("emu.env", _strings([f"{key}={value}" for key, value in environment.items()]))
    if job.tiles is not Tiles.GRANTED:
        disk.add("emu.noamx")
    if not job.fifo:
        disk.add("emu.nofifo")
    return disk.image()


def _strings(words: list[str]) -> bytes:
    return b"".join(word.encode() + b"\0" for word in words)


def memory_for(job: Job, ramdisk_bytes: int) -> int:
    """MiB of guest memory: what was asked for, or what the files need."""
    needed = max(job.memory_mib, (RAMDISK_ADDRESS + 2 * ramdisk_bytes) // 2**20 + 192)
    if needed > MEMORY_LIMIT_MIB:
        raise EmulationFailed(f"the guest would need {needed} MiB; the emulator has {MEMORY_LIMIT_MIB} at most")
    return needed


def start_info(ramdisk_bytes: int, memory_mib: int) -> bytes:
    """Xen's struct hvm_start_info, version 1, with a memory map and the RAM disk as its one module."""
    info = bytearray(0x1000)
    modules, memory_map, command_line = 0x100, 0x200, 0x400
    ranges = [(0, 0x9FC00), (0x100000, memory_mib * 2**20 - 0x100000)]
    struct.pack_into(
        "<IIIIQQQQII",
        info,
        0,
        0x336EC578,
        1,
        0,
        1,
        START_INFO_ADDRESS + modules,
        START_INFO_ADDRESS + command_line,
        0,
        START_INFO_ADDRESS + memory_map,
        len(ranges),
        0,
    )
    struct.pack_into("<QQQQ", info, modules, RAMDISK_ADDRESS, ramdisk_bytes, 0, 0)
    for i, (start, size) in enumerate(ranges):
        struct.pack_into("<QQII", info, memory_map + 24 * i, start, size, 1, 0)
    text = COMMAND_LINE.encode()
    info[command_line : command_line + len(text)] = text
    return bytes(info)


def write_disk(path: Path, emulator: Emulator, ramdisk: bytes, memory_mib: int) -> None:
    """The disk that guest/rom.S reads: a table in the first sector, then the pieces."""
    kernel_address, entry = emulator.kernel_place
    head = bytearray(SECTOR)
    struct.pack_into("<III", head, 0, 0x55AA, entry, START_INFO_ADDRESS)
    pieces = (
        (start_info(len(ramdisk), memory_mib), START_INFO_ADDRESS),
        (emulator.kernel, kernel_address),
        (ramdisk, RAMDISK_ADDRESS),
    )
    with path.open("wb") as file:
        file.write(bytes(SECTOR))
        for i, (data, address) in enumerate(pieces):
            sectors = (len(data) + SECTOR - 1) // SECTOR
            struct.pack_into("<III", head, 16 + 12 * i, file.tell() // SECTOR, sectors, address)
            file.write(data)
            file.write(bytes(sectors * SECTOR - len(data)))
        file.write(bytes(-file.tell() % CYLINDER))
        file.seek(0)
        file.write(head)
