"""The Python extension as installed, imported and used on an emulated CPU by a Python of a dozen files."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tools.emulate.emulator import GUEST_SOURCES
from tools.emulate.errors import EmulationFailed, NotAvailable
from tools.emulate.job import Job
from tools.emulate.scenarios import Scenario

SCRIPT = GUEST_SOURCES / "extension_test.py"
GUEST_HOME = "/python"

# Runs on the host: the layer's fingerprint there, and which files of the standard library that took.
PROBE = """
import sys
sys.path[:0] = sys.argv[1:]
import extension_test, _ext
print(extension_test.fingerprint(extension_test.layer_output(_ext, "generic", "INT8")))
print("\\n".join(str(getattr(m, "__file__", None)) for m in list(sys.modules.values())))
"""


@dataclass(frozen=True)
class Bundle:
    """What the guest needs to run the script."""

    python: Path
    files: tuple[tuple[Path, str], ...]
    fingerprint: str


def bundle() -> Bundle:
    """Of the Python that runs this; NotAvailable when the kernel is not installed there."""
    found = importlib.util.find_spec("kt_kernel")
    places = found.submodule_search_locations if found else None
    extensions = [
        file for place in places or () for file in Path(place).glob(f"_ext*{sysconfig.get_config_var('EXT_SUFFIX')}")
    ]
    if not extensions:
        raise NotAvailable(f"kt_kernel is not installed for {sys.executable}")
    python = Path(sys.executable).resolve()
    done = subprocess.run(
        [str(python), "-S", "-c", PROBE, str(GUEST_SOURCES), str(extensions[0].parent)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        raise EmulationFailed(f"the extension fails on this machine already:\n{done.stderr[-2000:]}")
    fingerprint, *modules = done.stdout.splitlines()
    library = Path(sysconfig.get_path("stdlib")).resolve()
    files = [(extensions[0], f"/test/{extensions[0].name}"), (SCRIPT, f"/test/{SCRIPT.name}")]
    for module in map(Path, modules):
        if module.is_relative_to(library) and module.exists():
            files += [(part, _guest_place(part, library)) for part in (module, _compiled(module)) if part.exists()]
    return Bundle(python, tuple(files), fingerprint)


def _compiled(module: Path) -> Path:
    return Path(importlib.util.cache_from_source(str(module))) if module.suffix == ".py" else module


def _guest_place(file: Path, library: Path) -> str:
    return f"{GUEST_HOME}/lib/{library.name}/{file.relative_to(library)}"


def job(scenario: Scenario, needs: Bundle, seconds: float) -> Job:
    """The script on the CPU of a scenario, whose last tier has to be the highest usable one."""
    return Job(
        needs.python,
        ("-S", "-B", f"/test/{SCRIPT.name}", scenario.tiers[-1], needs.fingerprint),
        model=scenario.model,
        exclude=scenario.exclude,
        tiles=scenario.tiles,
        files=needs.files,
        environment={"PYTHONHOME": GUEST_HOME, "PYTHONUTF8": "1"},
        seconds=seconds,
    )
