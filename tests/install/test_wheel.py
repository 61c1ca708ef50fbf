"""What ends up in the packages, and how the kernel is compiled and linked."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import kt_kernel
import kt_kernel._ext
from tests.install.machine import ROOT

_BUILD = "import json, sys; from scikit_build_core import build; getattr(build, sys.argv[1])(*json.loads(sys.argv[2]))"


def _build(hook: str, *arguments: object, sources: Path = ROOT) -> None:
    command = [sys.executable, "-c", _BUILD, hook, json.dumps(arguments)]
    run = subprocess.run(command, cwd=sources, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources, packed from this checkout and unpacked: a folder without .git."""
    folder = tmp_path_factory.mktemp("sdist")
    _build("build_sdist", str(folder))
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:  # Python before 3.11.4
            tar.extractall(folder)
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel_names(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Everything but the compiled extension of the wheel that the sdist makes."""
    folder = tmp_path_factory.mktemp("wheel")
    _build("build_wheel", str(folder), {"wheel.cmake": "false"}, sources=sdist)
    (archive,) = folder.glob("*.whl")
    with zipfile.ZipFile(archive) as wheel:
        return set(wheel.namelist())


@pytest.fixture(scope="module")
def compile_commands(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """How each source file of the kernel would be compiled."""
    folder = tmp_path_factory.mktemp("configure")
    cmake, ninja = (Path(sys.executable).with_name(name) for name in ("cmake", "ninja"))
    switches = ["-DKT_BUILD_PYTHON=OFF", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    command = [str(cmake), "-S", str(ROOT / "kernel"), "-B", str(folder), "-G", "Ninja", *switches]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    commands: list[dict[str, str]] = json.loads((folder / "compile_commands.json").read_text())
    return commands


def test_the_wheel_holds_both_packages_their_types_and_the_rule_files(wheel_names: set[str]) -> None:
    assert {"ktransformers/__init__.py", "kt_kernel/__init__.py", "kt_kernel/_ext.pyi"} <= wheel_names
    assert {"ktransformers/py.typed", "kt_kernel/py.typed"} <= wheel_names
    rules = {f"ktransformers/optimize_rules/{path.name}" for path in (ROOT / "optimize_rules").glob("*.yaml")}
    assert rules
    assert rules <= wheel_names


def test_the_wheel_holds_nothing_else(wheel_names: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ktransformers", "kt_kernel"}
    assert not [name for name in wheel_names if "__pycache__" in name or "_cache/" in name]


def test_the_sdist_can_be_built_and_installed_from(sdist: Path) -> None:
    for name in ("install.sh", "tools/install/build.sh", "kernel/CMakeLists.txt", "optimize_rules", "LICENSE"):
        assert (sdist / name).exists(), name
    assert not list(sdist.rglob("*.so"))
    if shutil.which("bash"):
        run = subprocess.run(["bash", "install.sh", "--help"], cwd=sdist, timeout=20, check=False)
        assert run.returncode == 0


def test_no_file_is_compiled_for_the_builders_cpu(compile_commands: list[dict[str, str]]) -> None:
    assert compile_commands
    for entry in compile_commands:
        assert not re.search(r"-m\w+=native", entry["command"]), entry["file"]


def test_vector_flags_stay_inside_the_folder_of_their_tier(compile_commands: list[dict[str, str]]) -> None:
    for entry in compile_commands:
        flags = [word for word in entry["command"].split() if word.startswith("-m") and word != "-m64"]
        if flags:
            assert "/tiers/" in entry["file"], (entry["file"], flags)
        if "/tiers/generic/" in entry["file"]:
            assert flags == []


def test_the_extension_needs_only_the_c_and_cxx_runtime() -> None:
    listing = subprocess.run(["ldd", kt_kernel._ext.__file__], capture_output=True, text=True, timeout=20, check=True)
    names = {line.split()[0].rsplit("/", 1)[-1].split(".so")[0] for line in listing.stdout.splitlines()}
    runtime = {"linux-vdso", "libstdc++", "libgcc_s", "libm", "libc", "libpthread", "libdl", "librt"}
    assert {name for name in names if not name.startswith("ld-linux")} <= runtime


def test_the_version_of_the_project_reaches_the_extension() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert kt_kernel._ext.__version__ == version
    assert kt_kernel.__version__ == version
