#!/usr/bin/env python3
"""Reads a build's object files and fails when an ISA tier could reach a CPU that lacks it.

    python tools/isa/check_objects.py build/cpp-tests

For each tier that the registry names (`kt_tests --tiers` says which, and what they need): its object exports one
symbol, its table's function; it has no static initialiser, which would run at import; no weak or COMDAT symbol, which
the linker could merge with code of an older tier; no undefined symbol beyond the C library's memory functions; and no
instruction of an extension that the registry does not ask the CPU for. Every other object has only instructions of
plain x86-64.

Needs nm, readelf and objdump, which come with any compiler. Exit status: 0 fine, 1 problems found, 2 cannot look.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ALLOWED_UNDEFINED = re.compile(
    r"mem(cpy|move|set|cmp)"
    r"|__mem(cpy|move|set)_chk|__stack_chk_fail"  # the same, as distributions that harden by default compile them
    r"|_GLOBAL_OFFSET_TABLE_"
)
INITIALISER_SECTIONS = (".init_array", ".preinit_array", ".ctors")

# Extension → instructions in AT&T syntax, `mnemonic operands`; the first match counts. The legacy encodings of SSE3 to
# SSE4.2 came before AVX and count as it.
_FEATURES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("amx_tile", r"(ld|st)tilecfg|tile(load|stor|zero|release)"),
        ("amx_int8", r"tdpb[su][su]d\b"),
        ("amx_bf16", r"tdpbf16ps"),
        ("another AMX extension", r"t(dp|cmm|mm|cvt|transpose)\w* .*%tmm"),
        ("avx512_bf16", r"v(dpbf16ps|cvtne2?ps2bf16)"),
        ("avx_vnni", r"\{vex\} vpdp(busd|wssd)"),
        ("avx512_vnni", r"vpdp(busd|wssd)"),
        ("avx512_fp16", r"v(?!cvtps2ph |cvtph2ps )(\w+[ps]hx? |cvt[ps]h2|movw )"),
        ("another AVX-512 extension", r"vp(erm[it]?2?b|multishift|sh[lr]d|compress[bw]|expand[bw])"),
        ("another AVX-512 extension", r"vp(madd52|popcnt|2inter|conflict|lzcnt|shufbitqmb)|v(exp2|rcp28|rsqrt28)"),
        ("gfni, aes or sha", r"v?(gf2p8|aes|pclmul)|sha(1|256)"),
        ("bmi", r"(andn|bextr|bls(i|r|msk)|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|lzcnt|movbe|ad[co]x)[lq]? "),
        ("f16c", r"vcvt(ph2ps|ps2ph)"),
        ("fma", r"vfn?m(add|sub|addsub|subadd)\d+[ps][sd]"),
        ("avx512f", r".*(%zmm|%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7])"),
        ("avx2", r"vp(?!ermil|test)\w* .*%ymm|v(pbroadcast|psllv|psrlv|psrav|pmaskmov|p?gather)"),
        ("avx2", r"v(broadcasti|extracti|inserti|perm2i|permq|permd|permpd|permps)"),
        ("avx", r"v(?!err|erw|mcall|mlaunch)"),
        ("avx", r"(addsub|hadd|hsub)p[sd]|lddqu|mov(d|sh|sl)dup|fisttp|(dp|round|insert|extract)[ps][sd]"),
        ("avx", r"p(abs|sign)[bwd] |p(alignr|shufb|maddubsw|mulhrsw)|p?blend|p(extr|insr)[bdq] |ph(add|sub)(sw|w|d)"),
        ("avx", r"p(mov[sz]x|test|muldq|mulld|ackusdw|hminpos)|p(max|min)(sb|sd|uw|ud) |pcmp(eqq|gtq|.str)"),
        ("avx", r"mpsadbw|movntdqa|crc32|popcnt"),
    )
)
_PREFIXES = ("lock ", "rep ", "repz ", "repnz ", "bnd ", "notrack ", "data16 ", "cs ", "ds ")


@dataclass(frozen=True)
class Tier:
    """One line of `kt_tests --tiers`."""

    name: str
    compiled: bool
    needs: frozenset[str]


class CannotLook(Exception):
    """The build or a tool is not there."""


def extension_of(instruction: str) -> str | None:
    """The extension an instruction (AT&T syntax) belongs to; None for plain x86-64."""
    while instruction.startswith(_PREFIXES):
        instruction = instruction.split(" ", 1)[1].lstrip()
    return next((name for name, pattern in _FEATURES if pattern.match(instruction)), None)


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise CannotLook(f"{command[0]} is not installed; it is part of binutils") from None
    except subprocess.CalledProcessError as error:
        raise CannotLook(f"{' '.join(command)} failed: {error.stderr.strip()}") from None


def instructions(path: Path) -> Iterator[str]:
    """The instructions of an object, `mnemonic operands` each."""
    for line in _run("objdump", "-d", "--no-show-raw-insn", str(path)).splitlines():
        match = re.match(r"\s+[0-9a-f]+:\s+(\S.*)", line)
        if match:
            yield re.sub(r"\s+", " ", match[1])


def extensions(path: Path) -> dict[str, str]:
    """Extension → the first instruction of it in an object."""
    found: dict[str, str] = {}
    for instruction in instructions(path):
        name = extension_of(instruction)
        if name is not None:
            found.setdefault(name, instruction)
    return found


def check_extensions(path: Path, needs: frozenset[str]) -> Iterator[str]:
    """Instructions of extensions that nobody asked the CPU for."""
    if "X86-64" not in _run("readelf", "-hW", str(path)):
        return
    if ".gnu.lto_" in _run("readelf", "-SW", str(path)):
        yield "was compiled for link-time optimisation: build with CMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF"
    for name, instruction in extensions(path).items():
        if name not in needs:
            yield f"has {name} code, which its CPU need not have: {instruction}"


def _symbols(path: Path, *options: str) -> Iterator[tuple[str, str]]:
    """(kind, name) of an object's symbols; kinds as nm prints them."""
    for line in _run("nm", "-C", *options, str(path)).splitlines():
        match = re.match(r"[0-9a-f]*\s+(\S) (.+)", line)
        if match:
            yield match[1], match[2]


def check_linkage(path: Path, tier: str) -> Iterator[str]:
    """What an ISA unit must not hold: exports, initialisers, weak symbols, references."""
    exported = [name for _, name in _symbols(path, "--extern-only", "--defined-only")]
    if exported != [f"kt::{tier}_table()"]:
        yield f"exports {', '.join(exported) or 'nothing'}; a tier exports kt::{tier}_table() alone"
    for kind, name in _symbols(path):
        if kind in "WwVvu":
            yield f"has the weak symbol {name}: the linker may keep this copy for every tier"
        elif kind == "U" and not ALLOWED_UNDEFINED.fullmatch(name):
            yield f"refers to {name}: a tier calls nothing but the C library's memory functions"
    if "COMDAT" in _run("readelf", "-gW", str(path)):
        yield "has a COMDAT group: the linker may keep this copy for every tier"
    for section in re.findall(r"\]\s+(\.\S+)", _run("readelf", "-SW", str(path))):
        if section.startswith(INITIALISER_SECTIONS):
            yield f"has the static initialiser section {section}: it would run when the library is loaded"


def registry(build: Path) -> list[Tier]:
    """The tiers that the built registry names."""
    program = build / "tests" / "kt_tests"
    if not program.exists():
        raise CannotLook(f"{program} is not there: build kernel/ with -DKT_BUILD_TESTS=ON into {build}")
    tiers = []
    for line in _run(str(program), "--tiers").splitlines():
        name, state, needs = line.split(" ")
        tiers.append(Tier(name, state == "compiled", frozenset(filter(None, needs.split(",")))))
    return tiers


def objects_of(build: Path, target: str) -> list[Path]:
    """The object files of a CMake target."""
    return sorted((build / "CMakeFiles" / f"{target}.dir").rglob("*.o"))


def check_build(build: Path) -> Iterator[tuple[str, str]]:
    """(object or tier, problem) for a whole build folder."""
    tiers = registry(build)
    for tier in tiers:
        objects = objects_of(build, f"kt_tier_{tier.name}")
        if len(objects) != tier.compiled:
            yield tier.name, f"has {len(objects)} objects, and the registry says {tier.compiled:d}"
        for path in objects:
            for problem in (*check_linkage(path, tier.name), *check_extensions(path, tier.needs)):
                yield path.name, problem
    known = {f"kt_tier_{tier.name}.dir" for tier in tiers}
    for folder in sorted((build / "CMakeFiles").glob("kt_tier_*.dir")):
        if folder.name not in known:
            yield folder.name, "belongs to a tier that the registry does not name"
    plain = objects_of(build, "kt_core") + objects_of(build, "_ext")
    if not plain:
        raise CannotLook(f"{build} holds no objects of kt_core")
    for path in plain:
        for problem in check_extensions(path, frozenset()):
            yield path.name, problem


def main() -> int:
    """The command line."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    build = Path(sys.argv[1])
    try:
        problems = list(check_build(build))
        for tier in registry(build):
            for path in objects_of(build, f"kt_tier_{tier.name}"):
                print(f"{tier.name:12} {', '.join(sorted(extensions(path))) or 'plain'}")
    except CannotLook as error:
        print(error, file=sys.stderr)
        return 2
    for name, problem in problems:
        print(f"{name} {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
