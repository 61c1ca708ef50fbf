"""The module tree as rules see it: dotted names, experts, modules that were replaced already."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

__all__ = [
    "collapse",
    "config_of",
    "experts_modules",
    "is_injected",
    "mark_injected",
    "unmark_injected",
    "walk",
    "without_numbers",
]

_MARK = "_ktransformers_injected"  # in the instance's __dict__, so that a deep copy carries it too
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module below the root with its dotted name, parents before children.

    A module that hangs at two places is met at both. What lies inside a replaced module is not met: rules are about
    the model's own modules.
    """
    yield from _walk(model, "", {id(model)})


def _walk(module: nn.Module, prefix: str, above: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        if child is None or id(child) in above:
            continue
        dotted = f"{prefix}{name}"
        yield dotted, child
        if not is_injected(child):
            yield from _walk(child, f"{dotted}.", above | {id(child)})


def experts_modules(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Names of the routed experts among `modules`; replaced ones and shared experts (ordinary MLPs) are not listed."""
    return [name for name, module in modules if _holds_experts(name, module) and not is_injected(module)]


def _holds_experts(name: str, module: nn.Module) -> bool:
    """By transformers' own flags, or by the name for classes outside its experts interface."""
    if hasattr(module, "is_concatenated") and hasattr(module, "is_transposed"):
        return True
    stacked = any(parameter.dim() >= 3 for parameter in module.parameters(recurse=False))
    return name.rpartition(".")[2] == "experts" and (stacked or bool(module._modules))


def is_injected(module: nn.Module) -> bool:
    """Whether this package put the module where it is."""
    return _MARK in module.__dict__


def mark_injected(module: nn.Module) -> None:
    """Remembers that this package put the module where it is."""
    module.__dict__[_MARK] = True


def unmark_injected(module: nn.Module) -> None:
    """Forgets `mark_injected`."""
    module.__dict__.pop(_MARK, None)


def config_of(model: nn.Module, dotted_name: str) -> Any:
    """The configuration of the nearest ancestor that has one: composite models have one for each part."""
    parts = dotted_name.split(".")[:-1]
    config, module = getattr(model, "config", None), model
    for part in parts:
        module = module._modules[part] or module
        config = module.__dict__.get("config", config)
    return config


def collapse(names: Iterable[str]) -> list[str]:
    """Names that differ in numbers only, as one each: `model.layers.N.mlp.experts, N = 1–23`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(without_numbers(name), []).append(name)
    return [members[0] if len(members) == 1 else _series(shape, members) for shape, members in groups.items()]


def without_numbers(name: str) -> str:
    """`model.layers.3.mlp` → `model.layers.N.mlp`."""
    return _NUMBER.sub("N", name)


def _series(shape: str, names: list[str]) -> str:
    numbers = [[int(number) for number in _NUMBER.findall(name)] for name in names]
    if any(len(found) != 1 for found in numbers):
        return f"{shape} ({len(names)} modules)"
    runs: list[list[int]] = []
    for number in sorted(found[0] for found in numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return f"{shape}, N = {', '.join(str(r[0]) if len(r) == 1 else f'{r[0]}–{r[-1]}' for r in runs)}"
