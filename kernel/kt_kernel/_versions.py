"""Refuses a compiled extension that does not belong to these Python files, such as a stale one first on the path."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

__all__ = ["check_extension"]

DISTRIBUTION = "ktransformers"
_NEEDED = ("Context", "MoE", "PackedExperts", "cpu_features", "cpu_name", "tiers", "topology")


def check_extension(extension: ModuleType, package_file: str) -> str:
    """The common version. Raises `ImportError` that names both files and says how to put it right."""
    compiled = getattr(extension, "__version__", "unknown")
    where = f"{package_file} with the compiled {getattr(extension, '__file__', 'extension')}"
    remedy = "delete the stale one of the two, or reinstall ktransformers"
    try:
        installed = version(DISTRIBUTION)
    except PackageNotFoundError:  # a build folder on the path, nothing installed
        installed = str(compiled)
    if installed != compiled:
        raise ImportError(f"kt_kernel {installed} from {where}, which is version {compiled}: {remedy}")
    if missing := [name for name in _NEEDED if not hasattr(extension, name)]:
        raise ImportError(f"kt_kernel {installed} from {where}, which lacks {', '.join(missing)}: {remedy}")
    return installed
