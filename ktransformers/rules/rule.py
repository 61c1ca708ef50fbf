"""What a rule file says, as plain objects."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ktransformers.errors import Problem

__all__ = ["DEFAULT", "Rule", "RuleSet"]

DEFAULT = "default"


@dataclass(frozen=True)
class Rule:
    """One rule: which modules it is about, and what becomes of them.

    `name` is searched (`re.search`) in the dotted module name, `module_class` is the dotted path of a class for
    `isinstance`; given both, both must hold. `replacement` is the dotted path of the operator, `"default"` keeps the
    module. `recursive=False` leaves everything below a matched module alone. `origin`, `line` and `number` say where
    the rule was written, for messages.

    Raises:
        ValueError: neither `name` nor `module_class` is given, or `name` is not a regular expression.
    """

    name: str | None = None
    module_class: str | None = None
    replacement: str = DEFAULT
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    recursive: bool = True
    origin: str = "<python>"
    line: int | None = None
    number: int = 1

    def __post_init__(self) -> None:
        if not self.name and not self.module_class:
            raise ValueError("a rule needs a `name` pattern or a `module_class` to match")
        if self.name is not None:
            try:
                re.compile(self.name)
            except re.error as error:
                raise ValueError(f"`name` {self.name!r} is not a regular expression: {error}") from error

    @property
    def keeps(self) -> bool:
        """True when the rule leaves the module itself as it is."""
        return self.replacement == DEFAULT

    @property
    def where(self) -> str:
        """`Mixtral.yaml:3: rule 1`, as error messages begin."""
        return str(self.problem("")).removesuffix(": ")

    def matches_name(self, dotted_name: str) -> bool:
        """Whether the pattern is found in the name; True for a rule without one."""
        return self.name is None or re.search(self.name, dotted_name) is not None

    def problem(self, text: str) -> Problem:
        """`text` as a problem of this rule, with its file and line."""
        return Problem(text, self.origin, self.line, self.number)


@dataclass(frozen=True)
class RuleSet:
    """The rules of one file (or list), in the order in which they are tried."""

    rules: tuple[Rule, ...]
    origin: str = "<python>"

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    def __len__(self) -> int:
        return len(self.rules)
