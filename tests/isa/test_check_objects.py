"""The check itself finds what it is there to find."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.isa.check_objects import check_extensions, check_linkage, extension_of

COMPILERS = (shlex.split(os.environ.get("CXX", "")), ["c++"], ["g++"])
COMPILER = next((words for words in COMPILERS if words and shutil.which(words[0])), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
on_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86-64 instructions")

GOOD = "namespace kt { struct T; static const int data = 1; const T* a_table() { return (const T*)&data; } }\n"


def _compile(tmp_path: Path, source: str, *flags: str) -> Path:
    assert COMPILER is not None
    path = tmp_path / "unit.cpp"
    path.write_text(source)
    subprocess.run([*COMPILER, "-O2", "-fPIC", *flags, "-c", str(path), "-o", str(path.with_suffix(".o"))], check=True)
    return path.with_suffix(".o")


@needs_compiler
def test_a_unit_with_its_table_alone_is_fine(tmp_path: Path) -> None:
    path = _compile(tmp_path, GOOD)
    assert [*check_linkage(path, "a"), *check_extensions(path, frozenset())] == []


@needs_compiler
@pytest.mark.parametrize(
    ("addition", "expected"),
    [
        ("int helper(int x) { return x + 1; }", "exports helper(int), kt::a_table()"),
        ("inline int shared(int x) { return x / 3; }\nint (*volatile keep)(int) = shared;", "weak symbol shared(int)"),
        ("template <class T> T shared(T x) { return x / 3; }\ntemplate int shared<int>(int);", "COMDAT group"),
        ("static volatile int seed; static const int x = seed + 1; static const int* volatile y = &x;", "initialiser"),
        ("int other(); static int f() { return other(); }\nstatic int (*volatile keep)() = f;", "refers to other()"),
    ],
)
def test_a_leak_is_found(tmp_path: Path, addition: str, expected: str) -> None:
    assert expected in "\n".join(check_linkage(_compile(tmp_path, GOOD + addition), "a"))


@needs_compiler
def test_a_unit_without_its_table_is_found(tmp_path: Path) -> None:
    assert "exports nothing" in "\n".join(check_linkage(_compile(tmp_path, "static int x;"), "a"))


@needs_compiler
def test_clearing_and_copying_memory_is_allowed(tmp_path: Path) -> None:
    source = """
    #include <string.h>
    static char a[999], b[999];
    static void f(int n) { memcpy(a, b, n); memset(b, 7, n); }
    static void (*volatile keep)(int) = f;
    """
    path = _compile(tmp_path, GOOD + source)
    assert list(check_linkage(path, "a")) == []


@on_x86
@needs_compiler
@pytest.mark.parametrize(
    ("flags", "extension"), [("-mavx2", "avx2"), ("-mavx512f", "avx512f"), ("-msse4.1", "avx"), ("-mbmi2", "bmi")]
)
def test_code_above_the_baseline_is_found(tmp_path: Path, flags: str, extension: str) -> None:
    loops = """
    void add(int* a, const int* b) { for (int i = 0; i < 4096; ++i) a[i] = a[i] * b[i] > 9 ? a[i] : b[i]; }
    unsigned long shift(unsigned long a, unsigned long b) { return a >> b; }
    """
    path = _compile(tmp_path, loops, "-O3", flags, *(["-mprefer-vector-width=512"] if "512" in flags else []))
    assert f"has {extension} code" in "\n".join(check_extensions(path, frozenset()))
    assert f"has {extension} code" not in "\n".join(check_extensions(path, frozenset({extension})))


@pytest.mark.parametrize(
    ("instruction", "extension"),
    [
        ("mov %rax,%rbx", None),
        ("addps %xmm1,%xmm0", None),
        ("cvtdq2ps %xmm0,%xmm1", None),
        ("rep stos %rax,%es:(%rdi)", None),
        ("lock xadd %eax,(%rdx)", None),
        ("tzcnt %eax,%eax", None),  # `rep bsf` to older CPUs, with the same answer where compilers use it
        ("verr %ax", None),
        ("pshufb %xmm1,%xmm0", "avx"),
        ("pmovsxbw (%rax),%xmm0", "avx"),
        ("popcnt %rax,%rax", "avx"),
        ("vaddps %xmm1,%xmm2,%xmm3", "avx"),
        ("vzeroupper", "avx"),
        ("vpaddd %ymm1,%ymm2,%ymm3", "avx2"),
        ("vpbroadcastd %xmm1,%ymm3", "avx2"),
        ("vfmadd231ps %ymm1,%ymm2,%ymm3", "fma"),
        ("vcvtph2ps (%rax),%ymm3", "f16c"),
        ("vcvtps2ph $0x8,%ymm0,(%rax)", "f16c"),
        ("vaddph %zmm1,%zmm2,%zmm3", "avx512_fp16"),
        ("shlx %rax,%rbx,%rcx", "bmi"),
        ("vpaddd %zmm1,%zmm2,%zmm3", "avx512f"),
        ("vaddps %xmm17,%xmm2,%xmm3", "avx512f"),
        ("kmovw %eax,%k1", "avx512f"),
        ("vpermb %zmm1,%zmm2,%zmm3", "another AVX-512 extension"),
        ("{vex} vpdpbusd %ymm1,%ymm2,%ymm3", "avx_vnni"),
        ("vpdpbusd %ymm1,%ymm2,%ymm3", "avx512_vnni"),
        ("vdpbf16ps %zmm1,%zmm2,%zmm3", "avx512_bf16"),
        ("vcvtneps2bf16 %zmm1,%ymm3", "avx512_bf16"),
        ("ldtilecfg (%rax)", "amx_tile"),
        ("tileloadd (%rax,%rbx,1),%tmm0", "amx_tile"),
        ("tilestored %tmm0,(%rax,%rbx,1)", "amx_tile"),
        ("tdpbusd %tmm6,%tmm4,%tmm0", "amx_int8"),
        ("tdpbf16ps %tmm6,%tmm4,%tmm0", "amx_bf16"),
        ("tdpfp16ps %tmm6,%tmm4,%tmm0", "another AMX extension"),
    ],
)
def test_instructions_are_told_apart(instruction: str, extension: str | None) -> None:
    assert extension_of(instruction) == extension
