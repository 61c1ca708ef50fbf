"""Numbers from the model and from Intel's manual, and the text that goes between the marks of the documentation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.mca.kernels import (
    TILE_LOOPS,
    VECTOR_LOOPS,
    TileLoop,
    VectorLoop,
    compile_tiers,
    compiler,
    tile_pass,
    vector_loop,
)
from tools.mca.loops import Instruction, assembly
from tools.mca.model import LOAD_PORTS, Throughput, Tool, find, throughput, total

BEGIN, END = "<!-- mca:begin -->", "<!-- mca:end -->"

# llvm-mca has no tile unit: it lets tile instructions through at four a cycle. These are Intel's figures for full tiles
# (Optimization Reference Manual, AMX: one product in 16 cycles, one tile load in 8).
PRODUCT_CYCLES = 16
TILE_LOAD_CYCLES = 8
PRODUCTS, TILE_LOADS = 4, 4
WEIGHT_BYTES = 128  # a pass of a vector loop: one row of both panels
ROWS = 32  # two full tiles: the 2x2 blocking
PREFETCHES = 32  # lines of two tiles of weights
DISPATCH_WIDTH = 6  # micro-operations a cycle


@dataclass(frozen=True)
class TileBudget:
    """One pass of the tile loop: how long each part of the core is busy with it. An out-of-order core overlaps them."""

    loop: TileLoop
    load_ports: float
    busiest: tuple[str, float]  # of the other ports, by the model, without the tile instructions
    front_end: float
    tile_unit: float = PRODUCTS * PRODUCT_CYCLES

    @property
    def bound(self) -> tuple[float, str]:
        """The longest of them."""
        port, cycles = self.busiest
        parts = ((self.tile_unit, "tile unit"), (self.load_ports, "load ports"), (cycles, port))
        return max(*parts, (self.front_end, "front end"))

    @property
    def products_per_16_cycles(self) -> float:
        return PRODUCTS * PRODUCT_CYCLES / self.bound[0]


@dataclass(frozen=True)
class VectorRow:
    """One line of the vector table."""

    loop: VectorLoop
    found: Throughput

    @property
    def bytes_per_cycle(self) -> float:
        return WEIGHT_BYTES / self.found.cycles


def _plain(instructions: list[Instruction]) -> list[Instruction]:
    """Without the tile instructions, which the model does not know."""
    return [each for each in instructions if not each.name.startswith(("tile", "tdp"))]


def measure(tool: Tool, folder: Path) -> tuple[list[VectorRow], list[TileBudget]]:
    """Compiles the tiers in `folder` and runs the model over every loop of the table."""
    tiers = compile_tiers(folder)
    vectors = [
        VectorRow(wanted, throughput(tool, assembly(vector_loop(tiers, wanted).body))) for wanted in VECTOR_LOOPS
    ]
    tiles = []
    for wanted in TILE_LOOPS:
        code = tile_pass(tiers, wanted)
        rest = total(
            [
                (1.0, throughput(tool, assembly(_plain(code.frame)))),
                (float(PREFETCHES), throughput(tool, assembly(code.prefetch))),
                (ROWS * wanted.depth / wanted.inputs, throughput(tool, assembly(code.epilogue))),
            ]
        )
        loads = TILE_LOADS * TILE_LOAD_CYCLES + rest.loads
        busiest = max((cycles, port) for port, cycles in rest.ports.items() if port not in LOAD_PORTS)
        tiles.append(TileBudget(wanted, loads, (busiest[1], busiest[0]), rest.uops / DISPATCH_WIDTH))
    return vectors, tiles


def heading(tool: Tool) -> str:
    """What the numbers depend on besides the sources."""
    return f"llvm-mca {tool.version}, `-mcpu=sapphirerapids`; code of {compiler()}."


def render(tool: Tool, vectors: list[VectorRow], tiles: list[TileBudget]) -> str:
    """The text between the marks."""
    lines = [
        BEGIN,
        heading(tool),
        "",
        "| vector loop | rows | cycles a pass | busiest port | load ports | weights, bytes a cycle |",
        "|---|---|---|---|---|---|",
    ]
    for row in vectors:
        loop, found = row.loop, row.found
        lines.append(
            f"| {loop.tier} {loop.format} | {loop.rows} | {found.cycles:.1f} "
            f"| {found.busiest}: {found.ports[found.busiest]:.1f} | {found.loads:.1f} | {row.bytes_per_cycle:.1f} |"
        )
    lines += [
        "",
        "| tile loop, 32 rows | tile unit | load ports | busiest other port | front end | bound by "
        "| tile products in 16 cycles |",
        "|---|---|---|---|---|---|---|",
    ]
    for budget in tiles:
        name, (port, cycles) = budget.loop.function.removesuffix("_by_tiles"), budget.busiest
        lines.append(
            f"| amx {budget.loop.format} {name}, K = {budget.loop.inputs} | {budget.tile_unit:.0f} "
            f"| {budget.load_ports:.0f} | {port}: {cycles:.0f} | {budget.front_end:.0f} | {budget.bound[1]} "
            f"| {budget.products_per_16_cycles:.2f} |"
        )
    return "\n".join([*lines, END])


def regenerate(folder: Path) -> str:
    """The text of today's sources; NotAvailable without the tool."""
    tool = find()
    return render(tool, *measure(tool, folder))


def between_marks(page: str) -> str | None:
    """The table in a page, marks included."""
    if BEGIN not in page or END not in page:
        return None
    return page[page.index(BEGIN) : page.index(END) + len(END)]


def with_table(page: str, text: str) -> str:
    """The page with its table replaced."""
    old = between_marks(page)
    if old is None:
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return page.replace(old, text)
