"""The inner loops that the table is about, found in the objects that the build makes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.mca.loops import Instruction, Loop, Ways, functions, innermost, loops, without
from tools.mca.model import NotAvailable

KERNEL = Path(__file__).resolve().parents[2] / "kernel"
TIERS = ("avx512_vnni", "avx512_bf16", "amx")


@dataclass(frozen=True)
class VectorLoop:
    """`rows` rows times one panel row of both panels: 128 bytes of weights a pass."""

    tier: str
    format: str
    tile: str  # the micro kernel in the source; with "<" one that weights of other formats share
    instruction: str
    per_row: int  # of these instructions
    rows: int


@dataclass(frozen=True)
class TileLoop:
    """Two tiles of rows times one tile of both panels: four tile products a pass, rows' epilogues between them."""

    format: str
    product: str
    function: str
    inputs: int  # K of the layer it is counted for
    depth: int  # inputs of one tile
    through: str  # an instruction that the counted way through the epilogue has


VECTOR_LOOPS = tuple(
    VectorLoop(tier, kind, tile, instruction, per_row, rows)
    for tier, kind, tile, instruction, per_row, counts in (
        ("avx512_vnni", "INT8", "Int8DotTile", "vpdpbusd", 2, (1, 4, 12)),
        ("avx512_bf16", "BF16", "Bf16DotTile<", "vdpbf16ps", 2, (1, 4, 12)),
        ("amx", "INT8", "Int8DotTile", "vpdpbusd", 2, (1, 4)),
        ("amx", "BF16", "Bf16LikeTiles<", "vfmadd", 4, (1, 4)),
    )
    for rows in counts
)
# Hidden size 2048, intermediate size 768, SwiGLU: the experts of Qwen3-30B-A3B. Its way through the epilogue is the
# shortest that divides and stores one vector: without a gate there are two, and other formulas are longer.
TILE_LOOPS = (
    TileLoop("INT8", "Int8Product", "gate_up_by_tiles", 2048, 64, "vdivps"),
    TileLoop("INT8", "Int8Product", "down_by_tiles", 768, 64, "vmovups"),
    TileLoop("BF16", "Bf16Product", "gate_up_by_tiles", 2048, 32, "vdivps"),
    TileLoop("BF16", "Bf16Product", "down_by_tiles", 768, 32, "vmovups"),
)


def _tool(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise NotAvailable(f"no {name} on this machine")
    return found


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def compile_tiers(folder: Path) -> dict[str, dict[str, list[Instruction]]]:
    """The functions of each tier, compiled in `folder` as the build compiles them."""
    ninja = _tool("ninja")
    for needed in ("objdump", "c++"):
        _tool(needed)
    generator = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}")
    _run(_tool("cmake"), "-S", KERNEL, "-B", folder, *generator, "-DCMAKE_BUILD_TYPE=Release", "-DKT_BUILD_PYTHON=OFF")
    _run(ninja, "-C", folder, f"-j{os.cpu_count() or 1}", *(f"kt_tier_{tier}" for tier in TIERS))
    found = {}
    for tier in TIERS:
        unit = folder / f"CMakeFiles/kt_tier_{tier}.dir/src/tiers/{tier}/{tier}.cpp.o"
        found[tier] = functions(_run("objdump", "-d", "--no-show-raw-insn", "-C", unit))
    return found


def compiler() -> str:
    """Name and version of the compiler, as far as its code may depend on it."""
    first = _run("c++", "--version").splitlines()[0]
    version = re.search(r"\d+\.\d+\.\d+", first)
    return f"{'Clang' if 'clang' in first else 'GCC'} {version[0] if version else first}"


def vector_loop(tiers: dict[str, dict[str, list[Instruction]]], wanted: VectorLoop) -> Loop:
    """The innermost loop with exactly the products that so many rows take."""
    count = wanted.per_row * wanted.rows
    for name, body in tiers[wanted.tier].items():
        if wanted.tile in name and "for_each_row<" in name and "::down<" in name:
            for loop in innermost(loops(body)):
                if loop.count(wanted.instruction) == count:
                    return loop
    raise LookupError(f"{wanted.tier}: no loop with {count} {wanted.instruction} ({wanted.tile}, {wanted.rows} rows)")


@dataclass(frozen=True)
class TilePass:
    """The code of one pass over K: prefetching and the epilogue of a row are loops inside it, the frame is the rest."""

    frame: list[Instruction]
    prefetch: list[Instruction]
    epilogue: list[Instruction]


def tile_pass(tiers: dict[str, dict[str, list[Instruction]]], wanted: TileLoop) -> TilePass:
    """The smallest loop with the four products, taken apart."""
    for name, body in tiers["amx"].items():
        if wanted.product not in name or wanted.function not in name or "for_each_row_by_tiles<" not in name:
            continue
        found = loops(body)
        outer = min((loop for loop in found if loop.count("tdp") == 4), key=lambda loop: len(loop.body))
        inner = [loop for loop in innermost(found) if outer.holds(loop)]
        prefetch = [loop for loop in inner if loop.count("prefetch")]
        epilogue = [loop for loop in inner if not loop.count("prefetch")]
        if prefetch and epilogue:
            row = Ways(body, max(epilogue, key=lambda loop: len(loop.body)), outer)
            frame = without(without(outer.body, prefetch[0].body), row.instructions)
            return TilePass(frame, list(prefetch[0].body), row.shortest(wanted.through))
    raise LookupError(f"amx: no tile loop {wanted.function}<{wanted.product}>")
