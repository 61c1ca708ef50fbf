"""Every exception the package raises on purpose.

::

    KTransformersError
    ├── RuleError                        something about the rules
    │   ├── RuleFileError (ValueError)   the rules cannot be read: YAML, schema, regex   .problems
    │   ├── RuleNotFoundError            no shipped rule file or path of that name
    │   └── RuleMatchError (ValueError)  well-formed rules that do not fit this model     .problems
    ├── UnknownOperatorError             `replace.class` or an `*_op` names nothing we have
    ├── UnknownModuleError               a module name that the model does not have
    ├── UnsupportedModuleError           a module whose arithmetic the operator does not implement
    ├── DeviceError (ValueError)         a device that is misspelt or not on this host
    ├── InjectionError                   constructing, loading or swapping failed
    │   ├── UndoError                    the replacement cannot be taken back
    │   └── FreedModuleError             a module lost its weights in a failed injection
    ├── CheckpointError                  a model folder is missing, incomplete or damaged
    ├── ServingError                     a server that cannot start: packages, address, port
    └── DoesNotFitError                  a model needs more memory than there is

The kernel has its own tree, `kt_kernel.KernelError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "CheckpointError",
    "DeviceError",
    "DoesNotFitError",
    "FreedModuleError",
    "InjectionError",
    "KTransformersError",
    "Problem",
    "RuleError",
    "RuleFileError",
    "RuleMatchError",
    "RuleNotFoundError",
    "ServingError",
    "UndoError",
    "UnknownModuleError",
    "UnknownOperatorError",
    "UnsupportedModuleError",
]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a rule, and where: `origin` is a path or `<python>`, `rule` counts from 1."""

    text: str
    origin: str = "<python>"
    line: int | None = None
    rule: int | None = None

    def __str__(self) -> str:
        place = self.origin if self.line is None else f"{self.origin}:{self.line}"
        return f"{place}: rule {self.rule}: {self.text}" if self.rule is not None else f"{place}: {self.text}"


class KTransformersError(Exception):
    """Base of every error this package raises on purpose."""


class RuleError(KTransformersError):
    """Something about the rules. `problems` holds all of them; `path`, `line` and `rule` describe the first."""

    def __init__(self, problems: Sequence[Problem] | str) -> None:
        self.problems: tuple[Problem, ...] = () if isinstance(problems, str) else tuple(problems)
        super().__init__(problems if isinstance(problems, str) else "\n".join(str(p) for p in problems))

    @property
    def path(self) -> str | None:
        return self.problems[0].origin if self.problems else None

    @property
    def line(self) -> int | None:
        return self.problems[0].line if self.problems else None

    @property
    def rule(self) -> int | None:
        return self.problems[0].rule if self.problems else None


class RuleFileError(RuleError, ValueError):
    """The rules cannot be read: not YAML, an unknown key, a wrong type, a bad regular expression."""


class RuleNotFoundError(RuleError, LookupError):
    """No shipped rule file and no path of that name."""


class RuleMatchError(RuleError, ValueError):
    """Well-formed rules that do not fit the model: dead, shadowed, or refused by their operator."""


class UnknownOperatorError(KTransformersError, LookupError):
    """A `replace.class`, `prefill_op` or `generate_op` that names nothing in the registry."""


class UnknownModuleError(KTransformersError, LookupError):
    """A module name, or a pattern for some, that the model does not have."""


class UnsupportedModuleError(KTransformersError):
    """A module whose arithmetic the operator does not implement exactly."""


class DeviceError(KTransformersError, ValueError):
    """A device that is misspelt, or that this host does not have while strictness was asked for."""


class InjectionError(KTransformersError, RuntimeError):
    """Constructing, loading or swapping an operator failed. The text says in which state the model is."""


class UndoError(InjectionError):
    """The replacement cannot be taken back."""


class FreedModuleError(InjectionError):
    """A module was called whose float weights were freed by an injection that then failed."""


class CheckpointError(KTransformersError, RuntimeError):
    """A model folder that is missing, incomplete or damaged."""


class ServingError(KTransformersError, RuntimeError):
    """The server cannot start: a package is missing, or the address or port cannot be had."""


class DoesNotFitError(KTransformersError, RuntimeError):
    """A model with its rules needs more memory than this process may take. The text has the numbers."""
