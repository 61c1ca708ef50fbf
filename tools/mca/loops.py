"""Finds the loops of a function in a disassembly and writes one as a text that llvm-mca assembles."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

HEAD = re.compile(r"^[0-9a-f]+ <(.*)>:$")
LINE = re.compile(r"^\s*([0-9a-f]+):\s+(.*?)\s*(?:#.*)?$")
STORE = re.compile(r"^vmov\w+\s+%[xyz]mm\d+,.*\)$")
STORE_COST = 1000  # more than any way has instructions
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


def without(instructions: Iterable[Instruction], others: Iterable[Instruction]) -> list[Instruction]:
    """The instructions that are none of `others`."""
    addresses = {each.address for each in others}
    return [each for each in instructions if each.address not in addresses]


class Ways:
    """The ways through one pass of an inner loop, parts that the compiler put elsewhere in the function included."""

    def __init__(self, function: list[Instruction], inner: Loop, outer: Loop) -> None:
        self._by_address = {each.address: each for each in function}
        self._next = dict(zip(self._by_address, [each.address for each in function[1:]], strict=False))
        self._head = inner.first
        forward = self._reached({inner.first}, outer.first)
        self._nodes = {address for address in forward if self._head in self._reached({address}, outer.first)}

    def _followers(self, address: int) -> list[int]:
        each = self._by_address[address]
        ends = each.name in ("jmp", "ret", "ud2")
        straight = [] if ends or address not in self._next else [self._next[address]]
        return [target for target in (each.target, *straight) if target in self._by_address]

    def _reached(self, start: set[int], stop: int) -> set[int]:
        """What follows `start` without passing the head of either loop; the heads themselves are not passed on."""
        found, open_ends = set(start), list(start)
        targets: set[int] = set()
        while open_ends:
            for follower in self._followers(open_ends.pop()):
                if follower in (self._head, stop):
                    targets.add(follower)
                elif follower not in found:
                    found.add(follower)
                    open_ends.append(follower)
        return (found | targets) - {stop}

    @property
    def instructions(self) -> list[Instruction]:
        """All that belong to a pass on any way."""
        return [self._by_address[address] for address in sorted(self._nodes)]

    def shortest(self, through: str = "") -> list[Instruction]:
        """The way with the fewest stores, then the fewest instructions, that has an instruction `through`."""
        # (address, whether `through` was met before it) -> (instructions from there on, what comes next)
        best: dict[tuple[int, bool], tuple[float, tuple[int, bool] | None]] = {}
        start = (self._head, not through)
        pending = [start]
        while pending:
            address, met = pending[-1]
            met = met or self._by_address[address].name.startswith(through)
            ahead = [(each, met) for each in self._followers(address) if each in self._nodes and each != self._head]
            waiting = [each for each in ahead if each not in best]
            if waiting:
                if len(pending) > 2 * len(self._nodes):
                    raise ValueError("there is a loop inside the loop")
                pending.append(waiting[0])
                continue
            cost = STORE_COST if STORE.match(self._by_address[address].text) else 1
            lengths: list[tuple[float, tuple[int, bool] | None]] = [(best[each][0] + cost, each) for each in ahead]
            if met and self._head in self._followers(address):
                lengths.append((cost, None))
            best[pending.pop()] = min(lengths, key=lambda way: way[0], default=(math.inf, None))
        if best[start][0] == math.inf:
            raise LookupError(f"no way through the loop has {through}")
        return self._along(start, best)

    def _along(
        self, start: tuple[int, bool], best: dict[tuple[int, bool], tuple[float, tuple[int, bool] | None]]
    ) -> list[Instruction]:
        way: list[Instruction] = []
        state: tuple[int, bool] | None = start
        while state is not None:
            way.append(self._by_address[state[0]])
            state = best[state][1]
        return way


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
