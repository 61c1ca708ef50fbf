"""One run: configures Bochs, starts it, passes the program's output on and returns its exit status."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.emulate.emulator import Emulator
from tools.emulate.errors import EmulationFailed
from tools.emulate.job import Job, Tiles, memory_for, ram_disk, write_disk
from tools.emulate.output import GuestOutput
from tools.emulate.packages import LIBRARIES

# Bochs 3.0's compacted state format is faulty (xsaves, xsavec); the rest only costs the guest kernel time.
EXCLUDED = ("xsaves", "xsavec", "uintr", "cet", "pks", "pku", "la57", "waitpkg")
AMX = ("amx_bf16", "amx_int8", "amx")
# With fewer instructions a second, the timer's ticks eat the guest's time.
INSTRUCTIONS_PER_SECOND = 50_000_000
TIMED_OUT = 124
_running: set[subprocess.Popen[bytes]] = set()
LAST_WORDS = 2000

CONFIGURATION = """config_interface: textconfig
display_library: term
cpu: model={model}, count=1, ips={ips}, reset_on_triple_fault=0, ignore_bad_msrs=1, exclude_features="{excluded}"
memory: guest={memory}, host={memory}
romimage: file={cache}/rom.bin
vgaromimage: file={cache}/vga.bin
vga: extension=none, update_freq=1
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=disk, mode=flat, path={folder}/disk.img, cylinders=0
clock: sync=none, time0=utc
parport1: enabled=1, file={folder}/out
pci: enabled=0
sound: waveoutdrv=dummy, waveindrv=dummy, midioutdrv=dummy
speaker: enabled=0
log: {folder}/bochs.log
panic: action=fatal
error: action=ignore
info: action=report
debug: action=ignore
"""


@dataclass(frozen=True)
class Outcome:
    """`status`: the program's; 128 + N when signal N ended it; 124 on time-out."""

    status: int
    output: str
    seconds: float


def run(emulator: Emulator, job: Job, show: Callable[[bytes], object] = lambda _: None) -> Outcome:
    """Runs the job; `show` gets the output as it comes. EmulationFailed when the emulator ends before the program."""
    folder = Path(tempfile.mkdtemp(prefix="kt-emulate-"))
    try:
        _configure(emulator, job, folder)
        with _bochs(emulator, folder, job.seconds) as process:
            return _follow(process, job, folder, show)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _configure(emulator: Emulator, job: Job, folder: Path) -> None:
    ramdisk = ram_disk(emulator, job)
    memory = memory_for(job, len(ramdisk))
    write_disk(folder / "disk.img", emulator, ramdisk, memory)
    # A model that never had AMX does not know the names.
    without = AMX if job.tiles is Tiles.ABSENT and job.model == "sapphire_rapids" else ()
    text = CONFIGURATION.format(
        model=job.model,
        ips=INSTRUCTIONS_PER_SECOND,
        excluded=" ".join((*EXCLUDED, *without, *job.exclude)),
        memory=memory,
        cache=emulator.folder,
        folder=folder,
    )
    (folder / "bochsrc").write_text(text)
    (folder / "out").touch()


def stop_all() -> None:
    """Ends every emulator that this process runs; the runs end with EmulationFailed."""
    for process in list(_running):
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # the session that _bochs made for it, nothing else


@contextmanager
def _bochs(emulator: Emulator, folder: Path, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    share = emulator.root / "usr/share/bochs"
    plugins = emulator.root / LIBRARIES / "bochs/plugins"
    environment = {
        "TERM": "vt100",
        "HOME": str(folder),
        "PATH": "/usr/bin:/bin",
        "BXSHARE": str(share),
        "LTDL_LIBRARY_PATH": str(plugins),
    }
    # The time-out here is for the case that this program is killed and cannot end the emulator itself.
    backstop = ["timeout", "--signal=KILL", f"{seconds + 60:.0f}"]
    command = [*backstop, *emulator.bochs, "-q", "-unlock", "-f", str(folder / "bochsrc")]
    screen, terminal = pty.openpty()  # Bochs wants a terminal; what it draws there goes to a file
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, cwd=folder, start_new_session=True
    )
    os.close(terminal)
    reader = threading.Thread(target=_drain, args=(screen, folder / "screen"), daemon=True)
    reader.start()
    _running.add(process)
    try:
        yield process
    finally:
        _running.discard(process)
        _kill(process)
        process.wait()
        reader.join(5)
        os.close(screen)


def _drain(screen: int, target: Path) -> None:
    with target.open("wb") as file:
        try:
            while data := os.read(screen, 65536):
                if file.tell() < 2**20:
                    file.write(data)
                    file.flush()
        except OSError:
            pass  # the other end has been closed


def _follow(process: subprocess.Popen[bytes], job: Job, folder: Path, show: Callable[[bytes], object]) -> Outcome:
    guest, shown = GuestOutput(), bytearray()
    began = time.monotonic()

    def pass_on(data: bytes) -> None:
        if data:
            shown.extend(data)
            show(data)

    with (folder / "out").open("rb") as stream:
        while True:
            ended = process.poll() is not None  # before reading: what it wrote last is still read
            pass_on(guest.feed(stream.read()))
            seconds = time.monotonic() - began
            if guest.status is not None:
                return Outcome(guest.status, shown.decode(errors="replace"), seconds)
            if ended or seconds > job.seconds:
                pass_on(guest.rest())
            if ended:
                raise EmulationFailed(f"the emulator stopped early; its last words:\n{_last_words(folder)}")
            if seconds > job.seconds:
                return Outcome(TIMED_OUT, shown.decode(errors="replace"), seconds)
            time.sleep(0.02)


def _last_words(folder: Path) -> str:
    files = [folder / "screen", folder / "bochs.log"]
    return "\n".join(file.read_text(errors="replace")[-LAST_WORDS:] for file in files if file.exists())
