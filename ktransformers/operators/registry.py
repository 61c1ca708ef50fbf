"""Names → operators: the short and dotted names a rule file may use, upstream's spellings included."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass

from torch import nn

from ktransformers.errors import UnknownOperatorError

__all__ = ["OperatorEntry", "canonical", "is_ours", "known_operators", "resolve"]

_PACKAGE = "ktransformers.operators."


@dataclass(frozen=True)
class OperatorEntry:
    """One operator a rule can put in, where its class lives, and the other names it answers to.

    An alias that lived in another module of upstream's operators is written with it: `ascend.ascend_linear.Name`.
    """

    name: str
    module: str
    attribute: str
    aliases: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return f"{_PACKAGE}{self.module}.{self.name}"

    def load(self) -> type[nn.Module]:
        operator = getattr(importlib.import_module(_PACKAGE + self.module), self.attribute)
        assert isinstance(operator, type)
        assert issubclass(operator, nn.Module)
        return operator


# The aliases are what upstream's rule files call the operator of the same work.
_ENTRIES = (
    OperatorEntry(
        "KTransformersExperts",
        module="experts",
        attribute="KTransformersExperts",
        aliases=(
            "KTransformersExpertsV2",
            "KGlm4Experts",
            "KSmallthinkerExperts",
            "ascend.ascend_experts.KTransformersExpertsW8A8",
        ),
    ),
    OperatorEntry(
        "KTransformersLinear",
        module="linear",
        attribute="KTransformersLinear",
        aliases=("ascend.ascend_linear.KTransformersLinearW8A8A2",),
    ),
)

# What upstream's rule files replace besides experts. transformers' own modules do this work here.
_RETIRED_MODULES = frozenset(
    {"attention", "balance_serve_attention", "ascend", "gate", "layernorm", "mlp", "models", "RoPE"}
)
# Named in rules as the op inside an operator, never as a replacement of their own.
_OPS = {
    **dict.fromkeys(("KExpertsCPU", "KExpertsTorch", "KExpertsMarlin"), "KTransformersExperts"),
    **dict.fromkeys(("KLinearCPU", "KLinearCPUInfer", "KLinearTorch", "KLinearQ8"), "KTransformersLinear"),
}


def known_operators() -> list[str]:
    """Every accepted name, dotted and short, sorted."""
    names = {alias for entry in _ENTRIES for alias in _names_of(entry)}
    return sorted(names)


def is_ours(path: str) -> bool:
    """Whether `resolve` is the one to ask: a short name, or a path into this package's operators."""
    return "." not in path or path.startswith(_PACKAGE)


def resolve(path: str) -> type[nn.Module]:
    """The class behind `KTransformersExperts` or `ktransformers.operators.experts.KTransformersExperts`.

    Raises `UnknownOperatorError` with the nearest names and everything that is supported.
    """
    entry = _entry_of(path)
    if entry is None:
        raise UnknownOperatorError(_explain(path))
    return entry.load()


def canonical(path: str) -> str | None:
    """Our own short name of an operator written in any accepted way; None for what `resolve` refuses."""
    entry = _entry_of(path)
    return None if entry is None else entry.name


def _entry_of(path: str) -> OperatorEntry | None:
    return next((entry for entry in _ENTRIES if path in _names_of(entry)), None)


def _names_of(entry: OperatorEntry) -> list[str]:
    names = []
    for name in (entry.name, *entry.aliases):
        module, _, leaf = name.rpartition(".")
        names += [leaf, f"{_PACKAGE}{module or entry.module}.{leaf}"]
    return names


def _explain(path: str) -> str:
    supported = "Supported: " + ", ".join(entry.path for entry in _ENTRIES) + "."
    leaf = path.rsplit(".", 1)[-1]
    if leaf in _OPS:
        return (
            f"{path} is an op, not a replacement: put {_OPS[leaf]} in and name {leaf} as its generate_op or "
            f"prefill_op. {supported}"
        )
    module = path.removeprefix(_PACKAGE).split(".", 1)[0]
    if path.startswith(_PACKAGE) and module in _RETIRED_MODULES:
        return (
            f"{path} is none of the operators of upstream's older rule files: correct its name, or drop the rule, "
            f"since transformers' own module does that work. {supported}"
        )
    near = difflib.get_close_matches(path, known_operators(), n=3, cutoff=0.6)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"there is no operator {path!r}.{hint} {supported}"
