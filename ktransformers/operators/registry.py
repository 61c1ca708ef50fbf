"""Names → operators: the short and dotted names a rule file may use, upstream's spellings included."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass

from torch import nn

from ktransformers.errors import UnknownOperatorError

__all__ = ["OperatorEntry", "is_ours", "known_operators", "resolve"]

_PACKAGE = "ktransformers.operators."


@dataclass(frozen=True)
class OperatorEntry:
    """One operator a rule can put in, where its class lives, and the other names it answers to."""

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


# One line an operator. The aliases are the classes that upstream's rule files put in place of experts modules.
_ENTRIES = (
    OperatorEntry(
        "KTransformersExperts",
        module="experts",
        attribute="KTransformersExperts",
        aliases=("KTransformersExpertsV2", "KGlm4Experts", "KSmallthinkerExperts"),
    ),
)

# What upstream's rule files replace besides experts. transformers' own modules do this work here.
_RETIRED_MODULES = frozenset(
    {"attention", "balance_serve_attention", "ascend", "gate", "layernorm", "linear", "mlp", "models", "RoPE"}
)
# Named in rules as the op inside KTransformersExperts, never as a replacement of their own.
_OPS = frozenset({"KExpertsCPU", "KExpertsTorch", "KExpertsMarlin"})


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
    for entry in _ENTRIES:
        if path in _names_of(entry):
            return entry.load()
    raise UnknownOperatorError(_explain(path))


def _names_of(entry: OperatorEntry) -> list[str]:
    short = (entry.name, *entry.aliases)
    return [*short, *(f"{_PACKAGE}{entry.module}.{name}" for name in short)]


def _explain(path: str) -> str:
    supported = "Supported: " + ", ".join(entry.path for entry in _ENTRIES) + "."
    leaf = path.rsplit(".", 1)[-1]
    if leaf in _OPS:
        return (
            f"{path} is an op, not a replacement: put KTransformersExperts in and name {leaf} as its generate_op or "
            f"prefill_op. {supported}"
        )
    module = path.removeprefix(_PACKAGE).split(".", 1)[0]
    if path.startswith(_PACKAGE) and module in _RETIRED_MODULES:
        return (
            f"{path} is a GPU operator of upstream's older rule files and is not part of this package: drop the rule, "
            f"transformers' own module does that work. {supported}"
        )
    near = difflib.get_close_matches(path, known_operators(), n=3, cutoff=0.6)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"there is no operator {path!r}.{hint} {supported}"
