"""The little of ELF (64 bits, little endian) that the boot image and the fix of the emulator need."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

PT_LOAD, PT_NOTE = 1, 4


@dataclass(frozen=True)
class Segment:
    """A program header: where it is in the file, and where it goes."""

    kind: int
    offset: int
    virtual: int
    physical: int
    file_size: int


def is_elf(data: bytes | bytearray) -> bool:
    return data[:6] == b"\x7fELF\x02\x01"


def segments(data: bytes | bytearray) -> list[Segment]:
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    found = []
    for i in range(count):
        kind, _, offset, virtual, physical, file_size, _, _ = struct.unpack_from("<IIQQQQQQ", data, table + i * size)
        found.append(Segment(kind, offset, virtual, physical, file_size))
    return found


def file_offset(parts: list[Segment], address: int) -> int | None:
    """Where the byte at a virtual address lies in the file."""
    for part in parts:
        if part.kind == PT_LOAD and part.virtual <= address < part.virtual + part.file_size:
            return part.offset + address - part.virtual
    return None


def notes(data: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """(name, type, content) of each note."""
    for part in segments(data):
        at = part.offset
        while part.kind == PT_NOTE and at < part.offset + part.file_size:
            name_size, size, kind = struct.unpack_from("<III", data, at)
            content = at + 12 + (name_size + 3 & ~3)
            yield data[at + 12 : at + 12 + name_size].rstrip(b"\0"), kind, data[content : content + size]
            at = content + (size + 3 & ~3)
