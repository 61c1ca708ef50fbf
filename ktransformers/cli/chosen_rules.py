"""`--rules` and `--backend`: the rules that a command goes by."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ktransformers.cli.console import say

if TYPE_CHECKING:
    from ktransformers.rules import RuleSet

__all__ = ["choose_rules"]

_EXPERTS_CLASS = "KTransformersExperts"


def choose_rules(model: str, rules: str | None, backend: str | None = None) -> RuleSet:
    """The rules asked for, or those that ship for the model's type; with another backend where one is asked for. None
    at all for a dense model of which nothing was asked.
    """
    from ktransformers.checkpoints import locate
    from ktransformers.injection import build_meta_model, experts_modules, walk
    from ktransformers.rules import RuleSet, default_rules_for, load_rules

    folder = locate(model)
    if rules is None or rules == "auto":
        meta = build_meta_model(folder)
        model_type = meta.config.model_type
        if backend is None and not experts_modules(walk(meta)):
            say(f"rules: none, {type(meta).__name__} is a dense model without experts")
            return RuleSet((), origin="no rules")
        path = default_rules_for(model_type)
        say(f"rules: {path.stem}, which ships for model type {model_type}")
        chosen = load_rules(path)
    else:
        chosen = load_rules(rules)
    return chosen if backend is None else _with_backend(chosen, backend)


def _with_backend(rules: RuleSet, backend: str) -> RuleSet:
    import kt_kernel
    from ktransformers.errors import RuleFileError
    from ktransformers.operators import registry

    kt_kernel.parse_backend(backend)
    has_backend = [registry.canonical(rule.replacement) == _EXPERTS_CLASS for rule in rules]
    if not any(has_backend):
        raise RuleFileError(f"--backend {backend}: no rule of {rules.origin} uses {_EXPERTS_CLASS}, whose it is")
    changed = (
        replace(rule, kwargs={**rule.kwargs, "backend": backend}) if has else rule
        for rule, has in zip(rules, has_backend, strict=True)
    )
    return replace(rules, rules=tuple(changed))
