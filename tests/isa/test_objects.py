"""The object files that ship: nothing of a higher instruction set leaks out of its unit."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.isa.conftest import ROOT, run
from tools.isa import check_objects

NO_NEEDS: frozenset[str] = frozenset()


@pytest.mark.slow
def test_every_tier_exports_its_table_alone_and_needs_what_its_code_uses(build: Path) -> None:
    assert [f"{name}: {problem}" for name, problem in check_objects.check_build(build)] == []


@pytest.mark.slow
def test_every_tier_of_the_sources_is_looked_at(build: Path) -> None:
    folders = {path.name for path in (ROOT / "kernel" / "src" / "tiers").iterdir() if path.is_dir()}
    assert {tier.name for tier in check_objects.registry(build)} == folders


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="tiers beyond generic are x86-64's")
def test_instructions_of_the_tiers_are_found_where_they_belong(build: Path) -> None:
    found = {
        tier.name: set(check_objects.extensions(path))
        for tier in check_objects.registry(build)
        for path in check_objects.objects_of(build, f"kt_tier_{tier.name}")
    }
    own = {
        "avx2": "avx2",
        "avx_vnni": "avx_vnni",
        "avx512": "avx512f",
        "avx512_vnni": "avx512_vnni",
        "avx512_bf16": "avx512_bf16",
        "amx": "amx_tile",
    }
    assert found["generic"] == set()
    for tier, extension in own.items():
        if tier in found:
            assert extension in found[tier]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="tiers beyond generic are x86-64's")
def test_amx_multiplies_in_tiles_and_does_all_the_rest_in_512_bit_vectors(build: Path) -> None:
    objects = check_objects.objects_of(build, "kt_tier_amx")
    if not objects:
        pytest.skip("this compiler cannot emit AMX")
    found = {extension for path in objects for extension in check_objects.extensions(path)}
    assert {"amx_tile", "amx_int8", "amx_bf16", "avx512f"} <= found


@pytest.mark.slow
def test_code_that_runs_at_import_is_plain(cmake: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("pybind11") is None:
        pytest.skip("pybind11 is not installed: the bindings cannot be compiled here")
    where = [sys.executable, "-m", "pybind11", "--cmakedir"]
    folder = subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()
    switches = ("-DKT_BUILD_PYTHON=ON", "-DCMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF", "-DSKBUILD_PROJECT_VERSION=0")
    python = (f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={folder}")
    run(cmake, "-S", ROOT / "kernel", "-B", tmp_path, "-G", "Ninja", *switches, *python)
    bindings = Path("CMakeFiles/_ext.dir/src/bindings.cpp.o")
    run("ninja", "-C", tmp_path, bindings)
    assert list(check_objects.check_extensions(tmp_path / bindings, NO_NEEDS)) == []


def test_a_folder_without_a_build_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["check_objects.py", str(tmp_path)])
    assert check_objects.main() == 2
    assert "KT_BUILD_TESTS=ON" in capsys.readouterr().err
