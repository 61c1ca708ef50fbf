"""What `kt doctor` finds out. Facts only; how they look is `doctor.py`'s business."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

import psutil

from ktransformers.memory import memory_limits

__all__ = ["Component", "Diagnosis", "Memory", "diagnose"]

_COMPONENTS = ("ktransformers", "kt_kernel", "torch", "transformers", "safetensors", "numpy")


@dataclass(frozen=True)
class Component:
    """A package: its version and the folder that `import` takes it from; empty when it is not installed."""

    name: str
    version: str
    path: str


@dataclass(frozen=True)
class Memory:
    """Bytes. `available` is what this process may still take; `limit` the tightest cgroup's or ulimit, None without."""

    total: int
    available: int
    limit: int | None


@dataclass
class Diagnosis:
    """Everything found. `problems` are sentences; an installation that is in order has none."""

    system: str
    python: str
    components: list[Component]
    memory: Memory
    environment: list[dict[str, str]] = field(default_factory=list)
    cpu: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def diagnose() -> Diagnosis:
    """Looks at this installation and this machine. Never raises for what is broken: that becomes a problem."""
    found = Diagnosis(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=f"{platform.python_version()} ({sys.executable})",
        components=[_component(name) for name in _COMPONENTS],
        memory=_memory(),
    )
    try:
        _ask_kernel(found)
    except ImportError as error:
        found.problems.append(f"the kernel cannot be imported: {error}")
    except Exception as error:  # a broken native library may raise anything, and the rest is still worth telling
        found.problems.append(f"the kernel does not answer: {type(error).__name__}: {error}")
    return found


def _component(name: str) -> Component:
    """Without importing it: torch alone would take seconds."""
    distribution = "ktransformers" if name == "kt_kernel" else name
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        version = ""
    spec = util.find_spec(name)
    origin = spec.origin if spec is not None else None
    return Component(name, version, str(Path(origin).parent) if origin else "")


def _memory() -> Memory:
    total = psutil.virtual_memory().total
    limits = memory_limits()
    below = [limit.total for limit in limits if limit.total < total]
    return Memory(total, limits[0].free, min(below, default=None))


def _ask_kernel(found: Diagnosis) -> None:
    import kt_kernel
    from kt_kernel import _ext, environment

    found.environment = environment.describe()
    found.problems += [row["problem"] for row in found.environment if row["problem"]]
    package, extension = Path(kt_kernel.__file__).parent, Path(_ext.__file__)
    found.problems += _skew(str(kt_kernel.__version__), package, extension)
    if not any(row["problem"] for row in found.environment):
        found.cpu = kt_kernel.cpu_info().as_dict()


def _skew(version: str, package: Path, extension: Path) -> list[str]:
    """Signs that the compiled extension is not the one these sources make."""
    problems = []
    installed = next((c.version for c in [_component("ktransformers")] if c.version), version)
    if installed != version:
        problems.append(f"ktransformers is {installed} but the kernel in {package} is {version}: install again")
    copies = [copy for copy in _extensions_on_path() if copy.resolve() != extension.resolve()]
    problems += [f"another compiled extension lies at {copy} (in use: {extension}): remove it" for copy in copies]
    sources = package.parent / "src"
    in_source_tree = (package.parent / "CMakeLists.txt").is_file()
    newest = max((path.stat().st_mtime for path in sources.rglob("*.[ch]pp") if in_source_tree), default=0.0)
    if newest > extension.stat().st_mtime:
        problems.append(f"{extension} is older than the sources in {sources}: install again")
    return problems


def _extensions_on_path() -> list[Path]:
    """Every compiled `kt_kernel._ext` that an import could find."""
    folders = dict.fromkeys(Path(entry or os.curdir) for entry in sys.path)
    return [path for folder in folders if folder.is_dir() for path in sorted((folder / "kt_kernel").glob("_ext.*.so"))]
