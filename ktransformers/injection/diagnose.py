"""Why a rule decides nothing, and what was probably meant."""

from __future__ import annotations

import re
from collections import Counter

from torch import nn

from ktransformers.errors import Problem
from ktransformers.hints import nearest
from ktransformers.injection.match import Matching, Modules, RuleUse, instance_class
from ktransformers.injection.proposal import propose_pattern
from ktransformers.injection.tree import collapse, experts_modules, without_numbers
from ktransformers.rules import Rule, RuleSet

__all__ = ["explain_unused", "is_dense", "near_names"]


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
        parts.append(near_names(rule.name, modules))
        parts.append(_proposal(rule, modules))
    else:
        classes = Counter(f"{type(module).__module__}.{type(module).__qualname__}" for _, module in modules)
        close = nearest(str(rule.module_class), classes, cutoff=0.4)
        parts.append(f"nearest classes in it: {', '.join(close)}" if close else "")
    return "; ".join(part for part in parts if part)


def _half_matches(rule: Rule, modules: Modules) -> str:
    """`name` and `class` are and-ed: says what the name alone finds."""
    named = [(name, type(module).__name__) for name, module in modules if rule.matches_name(name)]
    if not named:
        of_class = instance_class(str(rule.module_class))
        hints = [near_names(str(rule.name), modules)]
        hints.append(_proposal(rule, [(name, module) for name, module in modules if isinstance(module, of_class)]))
        return "; ".join(["`name` finds nothing", *(hint for hint in hints if hint)])
    classes = ", ".join(sorted({class_name for _, class_name in named}))
    names = "; ".join(collapse(name for name, _ in named[:200]))
    return f"`name` finds {names}, but none is a {rule.module_class} (they are {classes}); both must hold"


def near_names(pattern: str, modules: Modules) -> str:
    """The experts of the model, and the names that look like the pattern, in words; empty when there are none."""
    readable = _readable(pattern)
    experts, close = _look_alikes(readable, modules)
    parts = []
    if experts:
        parts.append(f"its experts are {'; '.join(collapse(experts))}")
    if close:
        parts.append(f"nearest names: {'; '.join(collapse(name for names in close for name in names))}")
    if experts and "experts." in readable:
        parts.append("transformers 5 keeps all experts of a layer in one module, so the pattern has to end there")
    return "; ".join(parts)


def _look_alikes(readable: str, modules: Modules) -> tuple[list[str], list[list[str]]]:
    """Experts, where the pattern may mean them, and the names of each shape that is near to it, nearest first."""
    depth = readable.count(".") + 1  # `self_atn.q_proj` is near to the end of a name, not to all of it
    by_ending: dict[str, list[str]] = {}
    for name, _ in modules:
        by_ending.setdefault(".".join(without_numbers(name).split(".")[-depth:]), []).append(name)
    experts = experts_modules(modules)
    close = [by_ending[ending] for ending in nearest(readable, by_ending, cutoff=0.5)]
    close = [names for names in close if not set(names) & set(experts)]
    return (experts if not close or "expert" in readable else []), close


def _proposal(rule: Rule, modules: Modules) -> str:
    """A pattern that finds what was probably meant, tried on the model; empty where nothing is near."""
    experts, close = _look_alikes(_readable(str(rule.name)), modules)
    names = [name for name, _ in modules]
    pattern = propose_pattern(str(rule.name), experts or next(iter(close), []), names)
    if pattern is None:
        return ""
    count = sum(1 for name in names if re.search(pattern, name))
    return f"try name: '{pattern}', which matches {count} module{'' if count == 1 else 's'} here"


_ANY = re.compile(r"\\d[+*]?|\[0-9\][+*]?|\.[*+]\??|\\w[+*]|\[\^\\?\.\][+*]|\{[\d,]*\}|(?<![\w])\d+(?![\w])")


def _readable(pattern: str) -> str:
    """The pattern as the name it was probably meant for: `^model\\.layers\\..*\\.mlp$` → `model.layers.N.mlp`."""
    plain = pattern.replace(r"\.", "\0")
    plain = _ANY.sub("N", plain).replace("\0", ".")
    return re.sub(r"[\^$()?\\\[\]]|\?:", "", plain)
