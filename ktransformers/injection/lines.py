"""What runs where, a line for each range of layers: the words a program says when it starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ktransformers.injection.plan import Plan
from ktransformers.injection.tree import collapse, without_numbers
from ktransformers.rules import Rule

__all__ = ["LayerEntry", "layer_lines"]


@dataclass(frozen=True)
class LayerEntry:
    """One replaced module: `details` is what its operator says of itself, as `describe()` has it."""

    name: str
    rule: Rule
    details: Mapping[str, str] = field(default_factory=dict)

    @property
    def told(self) -> str:
        """`rule 1 (moe.yaml:2): asked for AMXINT8, runs INT8 on avx2, 2 threads (KExpertsCPU)`."""
        asked = self.details.get("backend", "")
        plain = ", ".join(f"{key} {value}" for key, value in self.details.items() if key not in ("bytes", "backend"))
        runs = self.details.get("runs", plain).removeprefix(f"{asked} → ")
        place = f"{self.rule.origin}:{self.rule.line}" if self.rule.line is not None else self.rule.origin
        return f"rule {self.rule.number} ({place}): {f'asked for {asked}, ' if asked else ''}runs {runs}"


def layer_lines(entries: Iterable[LayerEntry], plan: Plan, *, verbose: bool = False) -> list[str]:
    """One line for all modules that differ in their layer's number only; `verbose`: one for each module.

    Names the rule, the backend it asks for and what runs. Experts that stay with transformers have lines of their own,
    with the rule that keeps them or the word that there is none.
    """
    told = [(entry.name, entry.told) for entry in entries]
    kept = [d for d in plan.decisions if d.operator is None and d.name.rpartition(".")[2] == "experts"]
    told += [(decision.name, f"rule {decision.rule.number} keeps transformers' own") for decision in kept]
    told += [(name, "no rule matches, transformers' own") for name in plan.unmatched_experts]
    if verbose:
        return [f"{name}: {text}" for name, text in told]
    groups: dict[tuple[str, str], list[str]] = {}
    for name, text in told:
        groups.setdefault((without_numbers(name), text), []).append(name)
    return [f"{'; '.join(collapse(names))}: {text}" for (_, text), names in groups.items()]
