"""Rule files written for upstream's archive, brought up to date: the tables are `ktransformers.operators.legacy`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ktransformers.errors import Problem, UnknownOperatorError
from ktransformers.hints import did_you_mean
from ktransformers.log import warn_once
from ktransformers.operators import registry
from ktransformers.operators.legacy import (
    FORMER_BLOCK_NAMES,
    NEAREST_BACKENDS,
    NEAREST_OPS,
    NEAREST_PREFILL_OPS,
    RENAMED_CLASSES,
    RETIRED,
    VENDORED_MODULES,
)
from ktransformers.rules import DEFAULT, Rule, RuleSet

__all__ = ["former_names", "modernised", "vendored_classes", "with_way_out"]

_VENDORED = "ktransformers.models."
_KIND_OF = {name: kind for kind, names in RETIRED.items() for name in names}


def modernised(rules: RuleSet) -> RuleSet:
    """The same rules in today's words. One line is logged for each kind of operator that is not here any more.

    A rule that puts in a retired operator keeps the module instead; an op or a backend that is not here becomes the
    nearest one that is, except where the rule says `strict`. Rules without such names, and a set of them,
    are returned as they are.
    """
    renewed = tuple(_modernised(rule) for rule in rules)
    if all(new is old for new, old in zip(renewed, rules, strict=True)):
        return rules
    return replace(rules, rules=renewed)


def vendored_classes(path: str) -> tuple[type, ...] | None:
    """The transformers classes that `ktransformers.models.modeling_….Class` stood for; None for any other path.

    Empty where transformers does not have the model. Raises UnknownOperatorError for what upstream did not have either.
    """
    if not path.startswith(_VENDORED):
        return None
    module, _, name = path.removeprefix(_VENDORED).rpartition(".")
    if module not in VENDORED_MODULES:
        meant = did_you_mean(module, VENDORED_MODULES)
        raise UnknownOperatorError(f"upstream had no model `{_VENDORED}{module}`; {meant}")
    families = VENDORED_MODULES[module]
    found = [found for family in families if (found := _class_in(family, name)) is not None]
    if families and not found:
        raise UnknownOperatorError(f"{path} stands for no class of transformers' {' or '.join(families)}")
    return tuple(found)


def former_names(modules: Sequence[tuple[str, nn.Module]]) -> dict[str, tuple[str, str]]:
    """Modules whose dotted name was another one in transformers 4 → the part that changed, and the whole old name."""
    blocks = {
        name: former
        for name, module in modules
        if (former := FORMER_BLOCK_NAMES.get(type(module).__name__)) is not None
    }
    if not blocks:
        return {}
    found: dict[str, tuple[str, str]] = {}
    for name, _ in modules:
        for block, former in blocks.items():
            if name == block or name.startswith(f"{block}."):
                found[name] = (former, f"{block.rpartition('.')[0]}.{former}{name[len(block) :]}")
    return found


def with_way_out(problems: Sequence[Problem]) -> list[Problem]:
    """Rules of an older file that decide nothing, with the switch that lets such a file run as it is."""
    hint = "in a rule file of upstream's this may be left as it is: legacy=True, or --legacy, makes it a warning"
    return [replace(problem, text=f"{problem.text}; {hint}") for problem in problems]


def _modernised(rule: Rule) -> Rule:
    kind = _retired_kind(rule)
    if kind is not None:
        warn_once(
            f"{rule.where}: {kind} of upstream's rule files are not in this package: transformers' own modules stay.",
            key=f"retired: {kind}",
        )
        return replace(rule, replacement=DEFAULT)
    if registry.canonical(rule.replacement) is not None and rule.kwargs.get("strict") is not True:
        kwargs = _nearest_arguments(rule)
        return rule if kwargs == rule.kwargs else replace(rule, kwargs=kwargs)
    return rule


def _retired_kind(rule: Rule) -> str | None:
    leaf = rule.replacement.rpartition(".")[2]
    if leaf in _KIND_OF and registry.is_ours(rule.replacement):
        return _KIND_OF[leaf]
    if registry.canonical(rule.replacement) == "KTransformersLinear" and rule.kwargs.get("strict") is not True:
        op = rule.kwargs.get("generate_op")
        return _KIND_OF.get(op) if isinstance(op, str) else None
    return None


def _nearest_arguments(rule: Rule) -> Mapping[str, Any]:
    kwargs = dict(rule.kwargs)
    op, backend = kwargs.get("generate_op"), kwargs.get("backend")
    if isinstance(op, str) and op in NEAREST_OPS:
        nearest = {key: value for key, value in NEAREST_OPS[op].items() if key != "backend" or not backend}
        changed = {key: value for key, value in nearest.items() if kwargs.get(key, value) != value or key == "backend"}
        kwargs |= nearest
        if changed:
            words = ", ".join(f"{key} {value}" for key, value in changed.items())
            _say_nearest(rule, f"generate_op {op} on {rule.kwargs.get('generate_device', 'its device')}", words)
    prefill = kwargs.get("prefill_op")
    if isinstance(prefill, str) and prefill in NEAREST_PREFILL_OPS:
        kwargs["prefill_op"] = NEAREST_PREFILL_OPS[prefill]
        _say_nearest(rule, f"prefill_op {prefill}", f"prefill_op {kwargs['prefill_op']}")
    if isinstance(backend, str) and backend.lower() in NEAREST_BACKENDS:
        kwargs["backend"] = NEAREST_BACKENDS[backend.lower()]
        _say_nearest(rule, f"backend {backend}", f"backend {kwargs['backend']}")
    return kwargs


def _say_nearest(rule: Rule, asked: str, runs: str) -> None:
    warn_once(f"{rule.where}: {asked} is not in this package: {runs} takes its place.", key=f"nearest: {asked}")


def _class_in(family: str, name: str) -> type | None:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    found = getattr(module, RENAMED_CLASSES.get(family, {}).get(name, name), None)
    return found if isinstance(found, type) else None
