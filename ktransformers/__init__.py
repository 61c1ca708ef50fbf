"""MoE models of transformers with their experts on a CPU kernel.

::

    from ktransformers import KTransformer

    model = KTransformer.from_pretrained("path/to/model", rules="auto")
    print(model.generate("Hello, world!"))

Names are imported when they are first used, so that `import ktransformers` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktransformers.errors import KTransformersError
    from ktransformers.forecasting import Forecast, forecast
    from ktransformers.injection import Plan, Report, make_plan
    from ktransformers.loading import KTransformersConfig
    from ktransformers.model import KTransformer, inject
    from ktransformers.rules import Rule, load_rules

__all__ = [
    "Forecast",
    "KTransformer",
    "KTransformersConfig",
    "KTransformersError",
    "Plan",
    "Report",
    "Rule",
    "__version__",
    "forecast",
    "inject",
    "load_rules",
    "make_plan",
]

_HOMES = {
    "Forecast": "ktransformers.forecasting",
    "KTransformer": "ktransformers.model",
    "KTransformersConfig": "ktransformers.loading",
    "KTransformersError": "ktransformers.errors",
    "Plan": "ktransformers.injection",
    "Report": "ktransformers.injection",
    "Rule": "ktransformers.rules",
    "forecast": "ktransformers.forecasting",
    "inject": "ktransformers.model",
    "load_rules": "ktransformers.rules",
    "make_plan": "ktransformers.injection",
}


def _common_version() -> str:
    """The version of this package and of its kernel, which have to be one."""
    import kt_kernel

    kernel: str = kt_kernel.__version__
    try:
        own = version("ktransformers")
    except PackageNotFoundError:  # a source tree on the path: the kernel was built from it
        return kernel
    if own != kernel:
        raise ImportError(
            f"ktransformers {own} ({__file__}) and kt_kernel {kernel} ({kt_kernel.__file__}) are not of one "
            "installation: remove the older one, or install again"
        )
    return own


__version__ = _common_version()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
