"""Debian's compressed kernel as a flat image that starts at its PVH entry, with the tile-permission hook laid in."""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from tools.emulate.elf import PT_LOAD, is_elf, notes, segments
from tools.emulate.errors import NotAvailable

LZ4_MAGIC = b"\x02\x21\x4c\x18"
PHYS32_ENTRY = 18  # XEN_ELFNOTE_PHYS32_ENTRY
FENTRY_CALL = 0xE8
FENTRY_BYTES = 5
# Further on, the kernel patches the function at boot.
HOOK_ROOM = 0x70
# cmp $0x1023,%edi: fpu_xstate_prctl asks whether it was called for ARCH_REQ_XCOMP_PERM.
PERMISSION_TEST = re.compile(rb"\x81\xff\x23\x10\x00\x00")


@dataclass(frozen=True)
class KernelImage:
    """What the boot ROM copies to `address` and then enters at `entry`."""

    data: bytes
    address: int
    entry: int


def decompress(vmlinuz: bytes, lz4: Sequence[str]) -> bytes:
    """The ELF inside; `lz4` is the command that runs lz4."""
    offset, length = struct.unpack_from("<II", vmlinuz, 0x248)  # payload_offset, payload_length of the boot header
    start = (vmlinuz[0x1F1] + 1) * 512 + offset
    payload = vmlinuz[start : start + length]
    if payload[:4] != LZ4_MAGIC:
        raise NotAvailable("the kernel is not compressed with LZ4")
    # The last four bytes are the size, not part of the stream.
    done = subprocess.run([*lz4, "-dc"], input=payload[:-4], capture_output=True, timeout=300, check=False)
    if not is_elf(done.stdout):
        raise NotAvailable("the kernel does not decompress to an ELF file")
    return done.stdout


def with_hook(kernel: bytes, hook: bytes) -> bytes:
    """`hook` over the body of fpu_xstate_prctl, behind its call of __fentry__."""
    test = PERMISSION_TEST.search(kernel)
    if test is None:
        raise NotAvailable("the kernel has no fpu_xstate_prctl")
    start = test.start() & ~15
    while start >= 0 and kernel[start] != FENTRY_CALL:
        start -= 16
    if start < 0 or test.start() - start > 64:
        raise NotAvailable("the start of the kernel's fpu_xstate_prctl is not as expected")
    if len(hook) > HOOK_ROOM:
        raise NotAvailable(f"the hook has {len(hook)} bytes, room is for {HOOK_ROOM}")
    body = start + FENTRY_BYTES
    return kernel[:body] + hook + kernel[body + len(hook) :]


def flatten(kernel: bytes, limit: int) -> KernelImage:
    """The loadable segments as one image below the physical address `limit`."""
    loads = [part for part in segments(kernel) if part.kind == PT_LOAD]
    entries = [content for name, kind, content in notes(kernel) if name == b"Xen" and kind == PHYS32_ENTRY]
    low = min(part.physical for part in loads)
    high = max(part.physical + part.file_size for part in loads)
    if not entries or high > limit:
        raise NotAvailable("the kernel's layout is not as expected: no PVH entry, or too large")
    image = bytearray(high - low)
    for part in loads:
        place = part.physical - low
        image[place : place + part.file_size] = kernel[part.offset : part.offset + part.file_size]
    return KernelImage(bytes(image), low, int.from_bytes(entries[0][:8], "little"))
