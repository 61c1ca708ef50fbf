"""Why a rule decides nothing, and what was probably meant."""

from __future__ import annotations

import re
from collections import Counter

from torch import nn

from ktransformers.errors import Problem
from ktransformers.hints import nearest
from ktransformers.injection.match import Matching, Modules, RuleUse
from ktransformers.injection.tree import collapse, experts_modules, without_numbers
from ktransformers.rules import Rule, RuleSet

__all__ = ["explain_unused", "is_dense"]


def is_dense(modules: Modules) -> bool:
    """True for a model without experts, replaced ones included."""
    return not any(name.rpartition(".")[2] == "experts" for name, _ in modules) and not experts_modules(modules)


def explain_unused(model: nn.Module, modules: Modules, rules: RuleSet, matching: Matching) -> list[Problem]:
    """One problem for each rule that decides nothing; for a dense model whose rules all fail, one for all."""
    unused = [use for use in matching.uses if not use.taken]
    if unused and is_dense(modules) and all(use.dead for use in matching.uses):
        return [Problem(_dense(model), rules.origin)]
    return [use.rule.problem(_dead(use.rule, modules) if use.dead else _shadowed(use)) for use in unused]


def _dense(model: nn.Module) -> str:
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    kind = f" (model_type {model_type})" if model_type else ""
    return (
        f"{type(model).__name__}{kind} is a dense model: it has no Mixture-of-Experts layers, so there is nothing to "
        "replace and nothing to gain; run it with transformers as it is"
    )


def _shadowed(use: RuleUse) -> str:
    """Names the rules that were first, with what each of them took."""
    reasons = []
    for winner, names in _by_rule(use.lost).items():
        reasons.append(f"rule {winner} decided {names} first")
    for winner, names in _by_rule(use.sheltered).items():
        reasons.append(f"rule {winner} leaves everything around {names} alone (`recursive: false`)")
    return f"never applies: {'; '.join(reasons)}. The first match wins: put the special rule above the general one"


def _by_rule(names: dict[str, Rule]) -> dict[int, str]:
    numbers: dict[int, list[str]] = {}
    for name, winner in names.items():
        numbers.setdefault(winner.number, []).append(name)
    return {number: "; ".join(collapse(lost)) for number, lost in numbers.items()}


def _dead(rule: Rule, modules: Modules) -> str:
    parts = ["matches no module of this model"]
    if rule.name and rule.module_class:
        parts.append(_half_matches(rule, modules))
    elif rule.name:
        parts.append(_near_names(rule.name, modules))
    else:
        classes = Counter(f"{type(module).__module__}.{type(module).__qualname__}" for _, module in modules)
        close = nearest(str(rule.module_class), classes, cutoff=0.4)
        parts.append(f"nearest classes in it: {', '.join(close)}" if close else "")
    return "; ".join(part for part in parts if part)


def _half_matches(rule: Rule, modules: Modules) -> str:
    """`name` and `class` are and-ed: says what the name alone finds."""
    named = [(name, type(module).__name__) for name, module in modules if rule.matches_name(name)]
    if not named:
        return f"`name` finds nothing; {_near_names(str(rule.name), modules)}"
    classes = ", ".join(sorted({class_name for _, class_name in named}))
    names = "; ".join(collapse(name for name, _ in named[:200]))
    return f"`name` finds {names}, but none is a {rule.module_class} (they are {classes}); both must hold"


def _near_names(pattern: str, modules: Modules) -> str:
    """The experts of the model, and the names that look like the pattern."""
    readable = _readable(pattern)
    by_shape: dict[str, list[str]] = {}
    for name, _ in modules:
        by_shape.setdefault(without_numbers(name), []).append(name)
    experts = experts_modules(modules)
    shapes = {without_numbers(name) for name in experts}
    close = [shape for shape in nearest(readable, by_shape, cutoff=0.5) if shape not in shapes]
    parts = []
    if experts and (not close or "expert" in readable):
        parts.append(f"its experts are {'; '.join(collapse(experts))}")
    if close:
        parts.append(f"nearest names: {'; '.join(collapse(name for shape in close for name in by_shape[shape]))}")
    if experts and "experts." in readable:
        parts.append("transformers 5 keeps all experts of a layer in one module, so the pattern has to end there")
    return "; ".join(parts)


_ANY = re.compile(r"\\d[+*]?|\[0-9\][+*]?|\.[*+]\??|\\w[+*]|\[\^\\?\.\][+*]|\{[\d,]*\}|(?<![\w])\d+(?![\w])")


def _readable(pattern: str) -> str:
    """The pattern as the name it was probably meant for: `^model\\.layers\\..*\\.mlp$` → `model.layers.N.mlp`."""
    plain = pattern.replace(r"\.", "\0")
    plain = _ANY.sub("N", plain).replace("\0", ".")
    return re.sub(r"[\^$()?\\\[\]]|\?:", "", plain)
