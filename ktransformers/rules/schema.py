"""Checks a parsed document against the rule format and builds the `Rule` objects. All problems come in one error."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import yaml

from ktransformers.errors import Problem, RuleFileError
from ktransformers.hints import nearest
from ktransformers.rules.document import Document
from ktransformers.rules.rule import DEFAULT, Rule, RuleSet

__all__ = ["build_rules"]

_RULE = ("match", "replace", "recursive")
_MATCH = ("name", "class")
_REPLACE = ("class", "kwargs")
_RESERVED = ("key", "gguf_loader", "config", "orig_module")  # what every operator is built with

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def build_rules(document: Document) -> RuleSet:
    """The rules of a document.

    Raises:
        RuleFileError: listing everything that is wrong, each with file, line and rule number.
    """
    if document.value is None:
        raise RuleFileError([Problem("no rules: the file is empty", document.origin)])
    if not isinstance(document.value, list):
        found = _kind(document.value)
        text = f"the top level must be a list of rules (`- match: …`), not {found}"
        raise RuleFileError([Problem(text, document.origin, document.line(()))])
    if not document.value:
        raise RuleFileError([Problem("no rules: the list is empty", document.origin, document.line(()))])
    checks = [_RuleCheck(document, index) for index in range(len(document.value))]
    rules = [check.run() for check in checks]
    problems = [problem for check in checks for problem in check.problems]
    if problems:
        raise RuleFileError(sorted(problems, key=lambda problem: (problem.rule or 0, problem.line or 0)))
    return RuleSet(tuple(rule for rule in rules if rule is not None), document.origin)


class _RuleCheck:
    """One entry of the list on its way to a `Rule`."""

    def __init__(self, document: Document, index: int) -> None:
        self.document = document
        self.index = index
        self.problems: list[Problem] = []

    def run(self) -> Rule | None:
        entry = self.document.value[self.index]
        if isinstance(entry, Rule):  # made in Python; one that came from a file keeps its place there
            return replace(entry, number=self.index + 1) if entry.line is None else entry
        if not isinstance(entry, Mapping):
            self._complain(f"a rule is a mapping with `match` and `replace`, not {_kind(entry)}")
            return None
        self._keys(entry, _RULE, ())
        name, module_class = self._match(entry)
        replacement, kwargs = self._replace(entry)
        recursive = entry.get("recursive", True)
        if not isinstance(recursive, bool):
            self._complain(f"`recursive` is true or false, not {_kind(recursive)}", "recursive")
        if self.problems:
            return None
        line = self.document.line((self.index,))
        return Rule(
            name, module_class, replacement, dict(kwargs), recursive, self.document.origin, line, self.index + 1
        )

    def _match(self, entry: Mapping[Any, Any]) -> tuple[str | None, str | None]:
        match = self._section(entry, "match", "say which modules: `match: {name: …}` or `{class: …}`")
        if match is None:
            return None, None
        self._keys(match, _MATCH, ("match",))
        if not match:
            self._complain("`match` needs `name` (a pattern), `class` (a dotted path), or both", "match")
        name = self._text(match, "name", "match")
        if name == "":
            self._complain("`match.name` is empty and would match every module", "match", "name")
        elif name is not None and (fault := _fault_in_regex(name)):
            self._complain(f"`match.name` {name!r} is not a regular expression: {fault}", "match", "name")
        return name, self._dotted(match, "match")

    def _replace(self, entry: Mapping[Any, Any]) -> tuple[str, Mapping[str, Any]]:
        keep = "say what becomes of them: `replace: {class: …}`, or `{class: default}` to keep the module"
        section = self._section(entry, "replace", keep)
        if section is None:
            return DEFAULT, {}
        self._keys(section, _REPLACE, ("replace",))
        return self._dotted(section, "replace") or DEFAULT, self._kwargs(section)

    def _kwargs(self, section: Mapping[Any, Any]) -> Mapping[str, Any]:
        kwargs = section.get("kwargs")
        if kwargs is None:
            return {}
        if not isinstance(kwargs, Mapping):
            self._complain(f"`replace.kwargs` is a mapping, not {_kind(kwargs)}", "replace", "kwargs")
            return {}
        for key in kwargs:
            path = ("replace", "kwargs", key)
            if not isinstance(key, str) or not key.isidentifier():
                self._complain(f"`replace.kwargs`: {key!r} cannot be the name of an argument", *path)
            elif key in _RESERVED:
                self._complain(f"`replace.kwargs`: `{key}` is given to every operator by the injection", *path)
        prefix = (self.index, "replace", "kwargs")
        for where, spelled in self.document.spelled.items():
            if where[:3] == prefix:
                meant = "true" if spelled.lower() in ("yes", "on") else "false"
                text = f'`{where[-1]}: {spelled}` is a boolean in YAML; write {meant}, or "{spelled}" in quotes'
                self._complain(text, *where[1:])
        for where, written in self.document.sixties.items():
            if where[:3] == prefix:
                key = next(part for part in reversed(where) if isinstance(part, str))
                text = f"`{key}: {written}` is {yaml.safe_load(written)} in YAML, which counts in sixties there"
                self._complain(f'{text}; write that number, or "{written}" in quotes', *where[1:])
        return kwargs

    def _section(self, entry: Mapping[Any, Any], key: str, remedy: str) -> Mapping[Any, Any] | None:
        misspelt = any(nearest(str(other), _RULE)[:1] == [key] for other in entry if other not in _RULE)
        if entry.get(key) is None and misspelt:  # said already
            return None
        if entry.get(key) is None:
            self._complain(f"`{key}` is missing; {remedy}", key)
            return None
        section = entry[key]
        if not isinstance(section, Mapping):
            self._complain(f"`{key}` is a mapping, not {_kind(section)}; {remedy}", key)
            return None
        return section

    def _keys(self, mapping: Mapping[Any, Any], known: tuple[str, ...], path: tuple[str, ...]) -> None:
        for key in mapping:
            if key in known:
                continue
            where = f"in `{'.'.join(path)}`" if path else "in a rule"
            text = f"unknown key `{key}` {where}"
            self._complain(f"{text}; {_remedy(key, known, path)}", *path, key)

    def _dotted(self, section: Mapping[Any, Any], inside: str) -> str | None:
        value = self._text(section, "class", inside)
        if value is not None and not _DOTTED.fullmatch(value):
            self._complain(f"`{inside}.class` {value!r} is not a dotted path such as torch.nn.Linear", inside, "class")
        return value

    def _text(self, section: Mapping[Any, Any], key: str, inside: str) -> str | None:
        value = section.get(key)
        if isinstance(value, str) or (value is None and (inside == "replace" or key not in section)):
            return value
        spelled = self.document.spelled.get((self.index, inside, key))
        hint = f" (YAML reads {spelled} as a boolean; put it in quotes)" if spelled else ""
        self._complain(f"`{inside}.{key}` is text, not {_kind(value)}{hint}", inside, key)
        return None

    def _complain(self, text: str, *path: Any) -> None:
        line = self.document.line((self.index, *path))
        self.problems.append(Problem(text, self.document.origin, line, self.index + 1))


def _fault_in_regex(pattern: str) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # `[[` and friends, which are about to change their meaning
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError, Warning) as error:
            return str(error)
    return None


def _remedy(key: Any, known: Iterable[str], path: tuple[str, ...]) -> str:
    """Where the key belongs: a misspelling, or an entry that slipped out of its section by a wrong indent."""
    known = tuple(known)
    close = nearest(str(key), known)
    if close:
        return f"did you mean `{close[0]}`?"
    homes = {"kwargs": "replace", "name": "match", "class": "match` or `replace", "recursive": "the rule itself"}
    home = homes.get(key) if isinstance(key, str) else None
    if home is not None and path != (home,):
        return f"it belongs in `{home}`: check the indent" if home != "the rule itself" else "it belongs beside `match`"
    if isinstance(key, bool):
        return "YAML reads on, off, yes and no as booleans; put such a key in quotes"
    return f"the keys are {', '.join(f'`{name}`' for name in known)}"


def _kind(value: Any) -> str:
    """What a value is, in the words of somebody who writes YAML."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}…"
