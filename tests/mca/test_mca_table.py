"""The table of llvm-mca's numbers: how it is made, and that the one in the documentation is today's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mca.kernels import compiler
from tools.mca.loops import Ways, assembly, functions, innermost, loops, without
from tools.mca.model import NotAvailable, Throughput, Tool, find, throughput, total
from tools.mca.table import BEGIN, END, between_marks, heading, regenerate, with_table

PAGE = Path(__file__).resolve().parents[2] / "docs/mca.md"
DISASSEMBLY = """
0000000000000000 <void sum<int>(int*)>:
   0:	xor    %eax,%eax
   2:	vpdpbusd (%rsi),%zmm0,%zmm1        # 40 <x+0x1>
   4:	add    $0x40,%rsi
   6:	jne    2 <void sum<int>(int*)+0x2>
   8:	prefetcht1 (%rdi)
   a:	jmp    0 <void sum<int>(int*)>
   c:	ret

0000000000000010 <other>:
  10:	ret
"""


def _tool() -> Tool:
    try:
        return find()
    except NotAvailable as reason:
        pytest.skip(str(reason))


def test_loops_are_found_by_their_jumps_back_and_the_inner_one_is_told_apart() -> None:
    found = loops(functions(DISASSEMBLY)["void sum<int>(int*)"])
    assert [(loop.first, loop.last) for loop in found] == [(0x2, 0x6), (0x0, 0xA)]
    assert innermost(found) == [found[0]]
    assert found[0].count("vpdpbusd") == 1
    assert [each.name for each in without(found[1].body, found[0].body)] == ["xor", "prefetcht1", "jmp"]


def test_a_loop_becomes_a_text_with_one_label_and_without_symbols() -> None:
    (inner, _) = loops(functions(DISASSEMBLY)["void sum<int>(int*)"])
    assert assembly(inner.body) == "1:\nvpdpbusd (%rsi),%zmm0,%zmm1\nadd    $0x40,%rsi\njne 1b\n"


def test_parts_of_a_pass_add_up_port_by_port() -> None:
    one = Throughput(2.0, 3.0, {"p0": 1.0, "p2": 3.0, "p3": 0.0, "p11": 0.0})
    both = total([(1.0, one), (2.0, one)])
    assert (both.cycles, both.uops, both.busiest, both.ports["p2"], both.loads) == (6.0, 9.0, "p2", 9.0, 3.0)


def test_the_model_counts_a_chain_of_additions() -> None:
    assert throughput(_tool(), "imul %rax, %rax\nimul %rax, %rax\n").cycles == 6.0


def test_a_text_that_is_no_assembly_is_an_error_that_shows_it() -> None:
    tool = _tool()
    with pytest.raises(ValueError, match="frobnicate"):
        throughput(tool, "frobnicate %rax\n")


def test_a_page_keeps_everything_but_its_table() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert between_marks(page) == f"{BEGIN}\nold\n{END}"
    assert with_table(page, f"{BEGIN}\nnew\n{END}") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    with pytest.raises(ValueError, match="mca:begin"):
        with_table("no marks", "text")


def test_without_llvm_mca_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotAvailable, match="apt-get install llvm"):
        find()


def test_an_llvm_mca_too_old_for_the_cpu_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "llvm-mca"
    old.write_text("#!/bin/sh\necho 'Debian LLVM version 14.0.6'\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotAvailable, match="LLVM 17 or later"):
        find()


@pytest.mark.slow
def test_the_documented_table_is_what_todays_sources_give(tmp_path: Path) -> None:
    tool = _tool()
    documented = between_marks(PAGE.read_text())
    assert documented is not None
    if heading(tool) not in documented:
        pytest.skip(f"the table was made with other tools than {tool.version} and {compiler()}")
    assert documented == regenerate(tmp_path)


def test_the_documented_tile_loops_reach_nine_tenths_of_the_tile_unit() -> None:
    documented = between_marks(PAGE.read_text())
    assert documented is not None
    lines = [line for line in documented.splitlines() if line.startswith("| amx") and "K =" in line]
    rates = [float(line.split("|")[-2]) for line in lines]
    assert len(rates) == 4
    assert min(rates) >= 0.9


BRANCHES = """
0000000000000000 <f>:
   0:	tdpbusd %tmm6,%tmm4,%tmm0
   2:	mov    %rax,%rbx
   4:	je     20 <f+0x20>
   6:	vmulps %zmm0,%zmm0,%zmm0
   8:	vmulps %zmm0,%zmm0,%zmm0
   a:	jne    2 <f+0x2>
   c:	jne    0 <f>
   e:	ret
  20:	vdivps %zmm0,%zmm0,%zmm0
  21:	jb     2a <f+0x2a>
  22:	jg     a <f+0xa>
  24:	vaddps %zmm0,%zmm0,%zmm0
  26:	jmp    a <f+0xa>
  2a:	vmovups %zmm0,0x40(%rax)
  2b:	jmp    a <f+0xa>
"""


def test_of_alternatives_in_a_loop_one_way_is_taken_wherever_the_compiler_put_it() -> None:
    function = functions(BRANCHES)["f"]
    inner, outer = (each for each in loops(function) if each.last in (0xA, 0xC))
    ways = Ways(function, inner, outer)
    assert [hex(each.address) for each in ways.shortest("vdivps")] == ["0x2", "0x4", "0x20", "0x21", "0x22", "0xa"]
    assert [each.name for each in ways.shortest("vaddps")] == [
        "mov",
        "je",
        "vdivps",
        "jb",
        "jg",
        "vaddps",
        "jmp",
        "jne",
    ]
    assert [each.name for each in ways.shortest("vmulps")] == ["mov", "je", "vmulps", "vmulps", "jne"]
    assert [each.address for each in without(outer.body, ways.instructions)] == [0x0, 0xC]
    with pytest.raises(LookupError, match="vsqrtps"):
        ways.shortest("vsqrtps")
