"""Makes a private copy of Debian's Bochs multiply signed AMX bytes as signed.

Bochs 3.0 holds the bytes of TDPBSSD, TDPBSUD and TDPBUSD in unsigned variables before it widens them, so all four
int8 tile products behave like TDPBUUD. The wrong zero-extensions are single opcodes, as long as the right
sign-extensions, and are switched in place: movzbl to movsbl, shr $24 to sar $24. The compiler folded TDPBUSD into a
jump to TDPBSUD, so TDPBUSD gets a body of its own, laid over TMMULTF32PS, an instruction that no CPU model here has.

Only the exact machine code is changed; any other binary is refused.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

from tools.emulate.commands import output_of, require
from tools.emulate.elf import file_offset, is_elf, segments
from tools.emulate.errors import NotAvailable

# The inner loop as compiled: the element of A is in edx, that of B in ecx.
LOOP = bytes.fromhex(
    "440fb6c2 0fb6c6 440fb6d1 0fb6ed 450fafc2 4189ca c1e918 0fafc5 41c1ea10"
    "450fb6d2 4401c0 4189d0 c1ea18 41c1e810 0fafd1 450fb6c0 450fafc2 4401c0 01d0 0106"
)
# (place in LOOP, unsigned opcode byte, signed opcode byte)
Switches = tuple[tuple[int, int, int], ...]
SIGNED_A: Switches = ((2, 0xB6, 0xBE), (5, 0xB6, 0xBE), (53, 0xB6, 0xBE), (42, 0xEA, 0xFA))
SIGNED_B: Switches = ((9, 0xB6, 0xBE), (12, 0xB6, 0xBE), (33, 0xB6, 0xBE), (22, 0xE9, 0xF9))

PRODUCTS = ("TDPBSSD", "TDPBSUD", "TDPBUSD")
UNUSED = "TMMULTF32PS"
ENDBR_JMP = b"\xf3\x0f\x1e\xfa\xe9"  # endbr64; jmp rel32
# Opcodes with a 32-bit displacement, and where it starts: call, jmp, jcc.
DISPLACEMENT_AT = {0xE8: 1, 0xE9: 1, 0x0F: 2}


@dataclass(frozen=True)
class Function:
    """A function of the emulator: its address and length."""

    address: int
    size: int

    def holds(self, address: int) -> bool:
        return self.address <= address < self.address + self.size


def _unknown(what: str) -> NotAvailable:
    return NotAvailable(f"this Bochs is not the binary the fix was made for: {what}")


def sign(code: bytearray, switches: Switches) -> None:
    """Switches the extensions of the one inner loop in a function's code."""
    if code.count(LOOP) != 1:
        raise _unknown("the inner loop of an int8 tile product is not as expected")
    start = code.index(LOOP)
    for place, unsigned, signed in switches:
        if code[start + place] != unsigned:
            raise _unknown("an extension is not where it was")
        code[start + place] = signed


def moved(code: bytearray, old: Function, new: int, branches: list[tuple[int, int]]) -> bytearray:
    """The function's code for address `new`; `branches` are the (address, target) of its calls and jumps."""
    body = bytearray(code)
    for address, target in branches:
        if old.holds(target):
            continue
        place = address - old.address
        start = DISPLACEMENT_AT.get(body[place])
        if start is None:
            raise _unknown("a short jump leaves the body of TDPBSUD")
        struct.pack_into("<i", body, place + start, target - (new + place + start + 4))
    return body


def symbols(listing: str) -> dict[str, Function]:
    """The tile products in the output of `nm -D -S`."""
    found = {}
    for match in re.finditer(r"^([0-9a-f]+) ([0-9a-f]+) T _ZN8BX_CPU_C\d+(T[A-Z0-9]+)_TnnnTrmTreg", listing, re.M):
        found[match[3]] = Function(int(match[1], 16), int(match[2], 16))
    for name in (*PRODUCTS, UNUSED):
        if name not in found:
            raise _unknown(f"no symbol {name}")
    return found


def _branches(binary: Path, function: Function) -> list[tuple[int, int]]:
    stop = function.address + function.size
    limits = [f"--start-address={function.address:#x}", f"--stop-address={stop:#x}"]
    text = output_of(["objdump", "-d", "--no-show-raw-insn", *limits, binary])
    if "(%rip)" in text:
        raise _unknown("TDPBSUD addresses memory relative to itself")
    found = re.finditer(r"^\s*([0-9a-f]+):\s+(?:call|j\w+)\s+([0-9a-f]+) <", text, re.M)
    return [(int(match[1], 16), int(match[2], 16)) for match in found]


def fix(source: Path, target: Path) -> None:
    """Writes the mended copy, executable; NotAvailable, and no file, when `source` is not the known binary."""
    require("nm", "objdump")
    data = bytearray(source.read_bytes())
    if not is_elf(data):
        raise _unknown("not a 64-bit ELF program")
    parts = segments(data)
    functions = symbols(output_of(["nm", "-D", "-S", source]))
    ssd, sud, usd, spare = (functions[name] for name in (*PRODUCTS, UNUSED))

    def place_of(function: Function) -> int:
        place = file_offset(parts, function.address)
        if place is None:
            raise _unknown(f"address {function.address:#x} is not in the file")
        return place

    def replace(function: Function, code: bytearray) -> None:
        data[place_of(function) : place_of(function) + len(code)] = code

    def code_of(function: Function) -> bytearray:
        return data[place_of(function) : place_of(function) + function.size]

    jump = place_of(usd)
    (displacement,) = struct.unpack_from("<i", data, jump + len(ENDBR_JMP))
    if data[jump : jump + len(ENDBR_JMP)] != ENDBR_JMP or usd.address + 9 + displacement != sud.address:
        raise _unknown("TDPBUSD is no jump to TDPBSUD")
    if spare.size < sud.size:
        raise _unknown(f"{UNUSED} is too short for another body")

    own_body = moved(code_of(sud), sud, spare.address, _branches(source, sud))
    sign(own_body, SIGNED_B)
    replace(spare, own_body)
    struct.pack_into("<i", data, jump + len(ENDBR_JMP), spare.address - (usd.address + 9))
    for function, switches in ((ssd, SIGNED_A + SIGNED_B), (sud, SIGNED_A)):
        code = code_of(function)
        sign(code, switches)
        replace(function, code)
    target.write_bytes(data)
    target.chmod(0o755)
