"""What a caller wrote under `rules`, as objects for a given model."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ktransformers.log import get_logger
from ktransformers.operators import registry
from ktransformers.rules import RuleSet, RulesLike, default_rules_for, load_rules

__all__ = ["rules_for"]

log = get_logger("model")


def rules_for(model: nn.Module, rules: RulesLike | None, threads: int | None) -> RuleSet:
    """The rules as objects, with `threads` for operators of ours whose rule does not say. None and "auto": the shipped
    file of the model's type.
    """
    if rules is None or rules == "auto":
        config = getattr(model, "config", None)
        rules = default_rules_for(getattr(config, "model_type", None))
        log.info("rules chosen by the model's type: %s", rules)
    ruleset = load_rules(rules)
    if threads is None:
        return ruleset
    return replace(
        ruleset,
        rules=tuple(
            replace(rule, kwargs={"threads": threads, **rule.kwargs})
            if registry.canonical(rule.replacement) is not None
            else rule
            for rule in ruleset
        ),
    )
