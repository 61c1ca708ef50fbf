"""Rule files: YAML in, checked `Rule` objects out, and the catalogue of those that ship."""

from ktransformers.rules.catalog import ShippedRules, default_rules_for, find_rules, rules_folder, shipped_rules
from ktransformers.rules.load import RulesLike, load_rules, parse_rules, rule_text
from ktransformers.rules.rule import DEFAULT, Rule, RuleSet

__all__ = [
    "DEFAULT",
    "Rule",
    "RuleSet",
    "RulesLike",
    "ShippedRules",
    "default_rules_for",
    "find_rules",
    "load_rules",
    "parse_rules",
    "rule_text",
    "rules_folder",
    "shipped_rules",
]
