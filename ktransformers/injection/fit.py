"""May a module be replaced, and does its operator accept it and the rule's arguments? Asked before any is built."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ktransformers.errors import Problem
from ktransformers.hints import did_you_mean
from ktransformers.injection.freeing import FreedModule
from ktransformers.injection.match import Modules
from ktransformers.injection.tree import collapse, config_of, is_injected
from ktransformers.rules import Rule

__all__ = ["Candidate", "misfits", "untouchable"]

_ALWAYS = ("key", "gguf_loader", "config", "orig_module")

Candidate = tuple[str, nn.Module, Rule, type[nn.Module]]


def untouchable(modules: Modules, candidates: Iterable[Candidate]) -> list[Problem]:
    """Modules that were replaced already, lost their weights, or hang at a second place that is treated otherwise."""
    places: dict[int, list[str]] = {}
    for name, module in modules:
        places.setdefault(id(module), []).append(name)
    candidates = list(candidates)
    rule_at = {name: rule for name, _, rule, _ in candidates}
    problems = []
    for name, module, rule, _ in candidates:
        others = [other for other in places[id(module)] if rule_at.get(other) is not rule]
        if is_injected(module):
            text = f"{name} was replaced by {type(module).__name__} already; take that back first (`report.undo()`)"
            problems.append(rule.problem(text))
        elif isinstance(module, FreedModule):
            problems.append(rule.problem(f"{name} has no weights: {module.reason}"))
        elif others:
            shared = f"{name} and {', '.join(others)} are one and the same module"
            problems.append(rule.problem(f"{shared}; a rule has to match all of its places or none"))
    return problems


def misfits(model: nn.Module, candidates: Iterable[Candidate]) -> list[Problem]:
    """What the operators object to. One sentence met at many layers is one problem that lists them."""
    candidates = list(candidates)
    names_of: dict[int, set[str]] = {}
    for name, _, rule, _ in candidates:
        names_of.setdefault(id(rule), set()).add(name)
    places: dict[tuple[int, str], tuple[Rule, list[str]]] = {}
    for name, module, rule, operator in candidates:
        if is_injected(module) or isinstance(module, FreedModule):
            continue
        config = config_of(model, name)
        for text in _ask(operator, name, module, config, rule.kwargs) or _wrong_arguments(operator, rule.kwargs):
            general = text.replace(name, "{name}")
            places.setdefault((id(rule), general), (rule, []))[1].append(name)
    return [_problem(rule, general, names, names_of[id(rule)]) for (_, general), (rule, names) in places.items()]


def _problem(rule: Rule, general: str, names: list[str], matched: set[str]) -> Problem:
    text = general.replace("{name}", names[0])
    if rule.name and not rule.name.endswith("$") and (above := _above(names[0], matched)):
        text = f"{text.rstrip('.')}; the rule finds {above} and what lies below it: end the pattern with `$`"
    if len(names) == 1 and names[0] in text:
        return rule.problem(text)
    return rule.problem(f"{text} (at {'; '.join(collapse(names))})")


def _above(name: str, matched: set[str]) -> str | None:
    """The nearest module around `name` that the same rule matches."""
    parts = name.split(".")
    around = [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]
    return next((outer for outer in around if outer in matched), None)


def _ask(operator: type, name: str, module: nn.Module, config: Any, kwargs: Mapping[str, Any]) -> list[str]:
    check = getattr(operator, "check", None)
    if check is None:
        return []
    try:
        return list(check(key=name, orig_module=module, config=config, kwargs=kwargs))
    except Exception as error:  # of a third-party operator: a problem of the rule that names it, like any other
        return [f"{operator.__name__}.check failed: {type(error).__name__}: {error}"]


def _wrong_arguments(operator: type, kwargs: Mapping[str, Any]) -> list[str]:
    """Against the constructor's signature, for operators that leave their arguments unchecked."""
    try:
        parameters = inspect.signature(operator).parameters
    except (TypeError, ValueError):  # no signature to be had: construction will tell
        return []
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    foreign = [key for key in _ALWAYS if key not in named]
    if foreign and not takes_all:
        built = "operators are built as cls(key=, gguf_loader=, config=, orig_module=, **kwargs)"
        return [f"{operator.__name__} does not take {', '.join(foreign)}: {built}"]
    known = sorted(set(named) - set(_ALWAYS))
    unknown = [] if takes_all else [key for key in kwargs if key not in named]
    missing = [n for n in known if named[n].default is inspect.Parameter.empty and n not in kwargs]
    return [
        *(f"{operator.__name__} has no argument `{key}`; {did_you_mean(key, known)}" for key in unknown),
        *(f"{operator.__name__} needs the argument `{name}`" for name in missing),
    ]
