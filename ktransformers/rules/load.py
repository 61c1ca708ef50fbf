"""Whatever rules come as – a file, a shipped name, Python objects – to a `RuleSet`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ktransformers.errors import Problem, RuleFileError, RuleNotFoundError
from ktransformers.rules.catalog import find_rules, rules_folder
from ktransformers.rules.document import Document, parse_yaml
from ktransformers.rules.rule import Rule, RuleSet
from ktransformers.rules.schema import build_rules

__all__ = ["RulesLike", "load_rules", "parse_rules", "rule_text"]

RulesLike: TypeAlias = str | os.PathLike[str] | RuleSet | Sequence[Rule | Mapping[str, Any]]


def load_rules(source: RulesLike | object) -> RuleSet:
    """Reads and checks rules.

    Args:
        source: path of a rule file, bare name of a shipped one (`"moe"`), a list of dictionaries in the shape of the
            file, of `Rule` objects, or of both, or a `RuleSet`, which is returned as it is.

    Raises:
        RuleNotFoundError: no such file.
        RuleFileError: everything that is wrong with the rules, each with file, line and rule number.
    """
    if isinstance(source, RuleSet):
        return source
    if isinstance(source, (str, os.PathLike)):
        return _load_file(source)
    if isinstance(source, (list, tuple)):
        return build_rules(Document(list(source)))
    raise RuleFileError([Problem(f"rules are a file, a shipped name or a list of rules, not {type(source).__name__}")])


def parse_rules(text: str, origin: str = "<text>") -> RuleSet:
    """The rules in a YAML text. Raises RuleFileError as `load_rules` does, with `origin` in place of the file."""
    return build_rules(parse_yaml(text, origin))


def rule_text(source: str | os.PathLike[str]) -> tuple[Path, str]:
    """The file behind a path or a shipped name, and its text.

    Raises:
        RuleNotFoundError: no such file.
        RuleFileError: it cannot be read, or is no text in UTF-8.
    """
    if isinstance(source, str) and "\n" in source:
        raise RuleNotFoundError("rules were given as text; `parse_rules(text)` reads YAML text, `load_rules` a file")
    path = find_rules(source)
    try:
        return path, path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        fault = f"not a text in UTF-8: {error.reason} at byte {error.start}"
    except OSError as error:
        fault = f"cannot be read: {error.strerror}"
    raise RuleFileError([Problem(fault, _origin(path))])


def _load_file(source: str | os.PathLike[str]) -> RuleSet:
    path, text = rule_text(source)
    return parse_rules(text, _origin(path))


def _origin(path: Path) -> str:
    """A shipped file is called by the name it is addressed by, any other by the path that was given."""
    return path.name if path.parent == rules_folder() else str(path)
