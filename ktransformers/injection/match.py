"""First match wins: which rule decides which module, and what each rule would have matched alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from ktransformers.errors import Problem, UnknownOperatorError
from ktransformers.injection.legacy import former_names, vendored_classes
from ktransformers.injection.resolve import import_class
from ktransformers.injection.tree import is_injected
from ktransformers.rules import Rule, RuleSet

__all__ = ["Matching", "RuleUse", "instance_class", "match_rules"]

Modules = Sequence[tuple[str, nn.Module]]
_Classes = type | tuple[type, ...]


@dataclass
class RuleUse:
    """What became of one rule.

    `taken` are the modules it decided. `lost` are modules it matches that an earlier rule had decided, `sheltered`
    those that lie below a module whose rule says `recursive: false`; both with the rule that was in the way.
    """

    rule: Rule
    taken: list[str] = field(default_factory=list)
    lost: dict[str, Rule] = field(default_factory=dict)
    sheltered: dict[str, Rule] = field(default_factory=dict)

    @property
    def dead(self) -> bool:
        """True when the rule matches no module at all."""
        return not (self.taken or self.lost or self.sheltered)


@dataclass(frozen=True)
class Matching:
    """`decided` in the order of the tree, and one `RuleUse` a rule; rules whose class cannot be imported have none."""

    decided: list[tuple[str, nn.Module, Rule]]
    uses: list[RuleUse]
    sheltered: set[str]


def match_rules(rules: RuleSet, modules: Modules) -> tuple[Matching, list[Problem]]:
    """Tries every rule on every module. The problems are classes in `match.class` that cannot be imported."""
    tests, problems = _tests(rules)
    former = former_names(modules)
    uses = [RuleUse(rule) for rule, _ in tests]
    decided: list[tuple[str, nn.Module, Rule]] = []
    sheltered: set[str] = set()
    roof: tuple[str, Rule] | None = None  # the module whose subtree is left alone, and by which rule
    for name, module in modules:
        if roof is not None and not name.startswith(f"{roof[0]}."):
            roof = None
        if roof is not None:
            sheltered.add(name)
        winner: Rule | None = None
        for use, (rule, wanted) in zip(uses, tests, strict=True):
            if not _finds(rule, name, former) or not (wanted is None or isinstance(_original(module), wanted)):
                continue
            if roof is not None:
                use.sheltered[name] = roof[1]
            elif winner is None:
                winner = rule
                use.taken.append(name)
            else:
                use.lost[name] = winner
        if winner is not None:
            decided.append((name, module, winner))
            if not winner.recursive:
                roof = (name, winner)
    return Matching(decided, uses, sheltered), problems


def _original(module: nn.Module) -> nn.Module:
    """What a rule's class is about: a module that was replaced already is still of its class, to be told so."""
    original = getattr(module, "orig_module", None) if is_injected(module) else None
    return original if isinstance(original, nn.Module) else module


def _finds(rule: Rule, name: str, former: Mapping[str, tuple[str, str]]) -> bool:
    """A pattern in the words of transformers 4 is searched in the name that the module had there."""
    if name in former and rule.name is not None and former[name][0] in rule.name:
        return rule.matches_name(former[name][1])
    return rule.matches_name(name)


def _tests(rules: RuleSet) -> tuple[list[tuple[Rule, _Classes | None]], list[Problem]]:
    tests: list[tuple[Rule, _Classes | None]] = []
    problems: list[Problem] = []
    for rule in rules:
        try:
            tests.append((rule, instance_class(rule.module_class) if rule.module_class else None))
        except UnknownOperatorError as error:
            problems.append(rule.problem(f"`match.class`: {error}"))
    return tests, problems


def instance_class(path: str) -> _Classes:
    """What `match.class` asks `isinstance` for. Raises UnknownOperatorError."""
    vendored = vendored_classes(path)
    if vendored is not None:
        return vendored
    found = import_class(path)
    try:
        isinstance(None, found)
    except TypeError as error:  # a protocol, or any class whose metaclass will not answer
        raise UnknownOperatorError(f"no module can be tested for being a {path}: {error}") from error
    return found
