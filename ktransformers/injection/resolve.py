"""Dotted path → class, with errors that say which part of the path is wrong."""

from __future__ import annotations

import importlib
from types import ModuleType

from torch import nn

from ktransformers.errors import UnknownOperatorError
from ktransformers.hints import nearest
from ktransformers.operators import registry

__all__ = ["import_class", "operator_class"]


def operator_class(path: str) -> type[nn.Module]:
    """The class that `replace.class` names: one of ours by the registry, any other by import.

    Raises:
        UnknownOperatorError: nothing of that name, or not an `nn.Module` class.
    """
    if registry.is_ours(path):
        return registry.resolve(path)
    found = import_class(path)
    if not issubclass(found, nn.Module):
        raise UnknownOperatorError(f"{path} is no torch.nn.Module, so it cannot stand in a model")
    return found


def import_class(path: str) -> type:
    """Imports any class. This runs code of the module it lives in.

    Raises:
        UnknownOperatorError: naming the first part of the path that does not exist and the nearest names that do.
    """
    parts = path.split(".")
    module = _import_longest(parts)
    found: object = module
    rest = parts[len(module.__name__.split(".")) :]
    for depth, part in enumerate(rest):
        try:
            found = getattr(found, part)
        except AttributeError:
            above = ".".join(parts[: len(parts) - len(rest) + depth])
            close = nearest(part, [name for name in dir(found) if not name.startswith("_")])
            meant = f"; did you mean {' or '.join(close)}?" if close else ""
            raise UnknownOperatorError(f"{above} has no `{part}`{meant}") from None
    if not isinstance(found, type):
        raise UnknownOperatorError(f"{path} is not a class but a {type(found).__name__}")
    return found


def _import_longest(parts: list[str]) -> ModuleType:
    """The module that the longest importable beginning of the path names."""
    if len(parts) < 2:
        raise UnknownOperatorError(
            f"`{parts[0]}` is a bare name; a class is written with its module: package.module.Class"
        )
    module: ModuleType | None = None
    for length in range(1, len(parts)):
        name = ".".join(parts[:length])
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:  # the module exists and lacks something itself
                raise UnknownOperatorError(f"importing {name} failed: {error}") from error
            break
        except Exception as error:  # whatever a foreign module does at import
            raise UnknownOperatorError(f"importing {name} failed: {type(error).__name__}: {error}") from error
    if module is None:
        raise UnknownOperatorError(
            f"there is no module `{parts[0]}` to import {'.'.join(parts)} from; is it installed?"
        )
    return module
