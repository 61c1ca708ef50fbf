"""Finds the loops of a function in a disassembly and writes one as a text that llvm-mca assembles."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

HEAD = re.compile(r"^[0-9a-f]+ <(.*)>:$")
LINE = re.compile(r"^\s*([0-9a-f]+):\s+(.*?)\s*(?:#.*)?$")
JUMP = re.compile(r"^(j\w+|jmp)\s+([0-9a-f]+)\b")


@dataclass(frozen=True)
class Instruction:
    address: int
    text: str

    @property
    def name(self) -> str:
        return self.text.split(maxsplit=1)[0] if self.text else ""

    @property
    def target(self) -> int | None:
        """Where a jump goes."""
        match = JUMP.match(self.text)
        return int(match[2], 16) if match else None


@dataclass(frozen=True)
class Loop:
    """From the first instruction to the jump back to it."""

    body: tuple[Instruction, ...]

    @property
    def first(self) -> int:
        return self.body[0].address

    @property
    def last(self) -> int:
        return self.body[-1].address

    def holds(self, other: Loop) -> bool:
        return other != self and self.first <= other.first and other.last <= self.last

    def count(self, prefix: str) -> int:
        """Instructions whose name starts with `prefix`."""
        return sum(instruction.name.startswith(prefix) for instruction in self.body)


def functions(disassembly: str) -> dict[str, list[Instruction]]:
    """The functions in the output of `objdump -d --no-show-raw-insn -C`."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in disassembly.splitlines():
        if head := HEAD.match(line):
            current = found.setdefault(head[1], [])
        elif match := LINE.match(line):
            current.append(Instruction(int(match[1], 16), match[2]))
    return found


def loops(function: list[Instruction]) -> list[Loop]:
    """Every loop: the code between a jump backwards and its target."""
    place = {instruction.address: i for i, instruction in enumerate(function)}
    found = []
    for i, instruction in enumerate(function):
        start = place.get(instruction.target) if instruction.target is not None else None
        if start is not None and start <= i:
            found.append(Loop(tuple(function[start : i + 1])))
    return found


def innermost(found: list[Loop]) -> list[Loop]:
    return [loop for loop in found if not any(loop.holds(other) for other in found)]


def without(instructions: Iterable[Instruction], loop: Loop) -> list[Instruction]:
    """The instructions that are not part of `loop`."""
    return [each for each in instructions if not loop.first <= each.address <= loop.last]


def assembly(instructions: Iterable[Instruction]) -> str:
    """AT&T syntax with jumps to one label: llvm-mca runs the text in a straight line, whatever a jump would do."""
    lines = ["1:"]
    for instruction in instructions:
        if instruction.target is not None:
            lines.append(f"{instruction.name} 1b")
        elif instruction.text:
            # objdump names the symbol of a constant after its address; the address is enough.
            lines.append(re.sub(r"\s*<[^>]*>", "", instruction.text))
    return "\n".join(lines) + "\n"
