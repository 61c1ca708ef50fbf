"""YAML text → plain Python values that remember the line they were written on."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from ktransformers.errors import Problem, RuleFileError

__all__ = ["Document", "parse_yaml"]

Path = tuple[Hashable, ...]  # keys and indices from the top: (0, "match", "name")

_NUMBERS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}
_SPELLED_BOOLEANS = {"yes", "no", "on", "off"}


@dataclass(frozen=True)
class Document:
    """`value` and, by path from the top, the line of every entry, the booleans written as yes, no, on or off, and the
    numbers written in sixties, as `1:30`.
    """

    value: Any
    origin: str = "<python>"
    lines: dict[Path, int] = field(default_factory=dict)
    spelled: dict[Path, str] = field(default_factory=dict)
    sixties: dict[Path, str] = field(default_factory=dict)

    def line(self, path: Path) -> int | None:
        """Line of the entry at `path`, or of the nearest entry around it that has one."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


def parse_yaml(text: str, origin: str) -> Document:
    """Reads one YAML document with the safe loader.

    Raises:
        RuleFileError: not YAML, a tab, a duplicate key, a tag that would build an object, values nested too deep.
    """
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return Document(None, origin)
        duplicates = list(_duplicate_keys(root, origin, set()))
        if duplicates:
            raise RuleFileError(duplicates)
        value = loader.construct_document(root)  # flattens `<<` in the nodes, so the marks are taken afterwards
        document = Document(value, origin)
        _mark(root, (), document, {})
    except RuleFileError:
        raise
    except yaml.MarkedYAMLError as error:
        raise RuleFileError([_explain(error, text, origin)]) from error
    except yaml.reader.ReaderError as error:
        raise RuleFileError([_explain_character(error, text, origin)]) from error
    except yaml.YAMLError as error:
        raise RuleFileError([Problem(f"not YAML text: {error}", origin)]) from error
    except RecursionError:
        raise RuleFileError([Problem("values are nested too deep to be a rule file", origin)]) from None
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
        # PyYAML's constructors let these escape: `!!int x`, the date 2024-99-99, a number of a million digits.
        raise RuleFileError([Problem(f"a value cannot be read: {error}", origin)]) from error
    return document


def _duplicate_keys(node: yaml.Node, origin: str, seen: set[int]) -> Iterator[Problem]:
    """YAML lets the later of two equal keys win in silence; here both lines are named."""
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _duplicate_keys(item, origin, seen)
    elif isinstance(node, yaml.MappingNode):
        first: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if (key.tag, key.value) in first:
                    earlier = first[key.tag, key.value]
                    yield Problem(f"key `{key.value}` is given twice (first on line {earlier}); keep one", origin, line)
                first.setdefault((key.tag, key.value), line)
            yield from _duplicate_keys(value, origin, seen)


def _mark(node: yaml.Node, path: Path, document: Document, seen: dict[int, bool]) -> None:
    """Fills the document's tables. `seen` tells of each node whether it is still open, that is, around this one."""
    line = node.start_mark.line + 1
    if seen.get(id(node), False):  # `&a [*a]`
        raise RuleFileError([Problem("an alias refers to a value that contains it", document.origin, line)])
    document.lines.setdefault(path, line)
    if id(node) in seen:  # an alias of something marked already: a chain of them could expand without end
        return
    seen[id(node)] = True
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _mark(item, (*path, index), document, seen)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                below = (*path, key.value)
                document.lines[below] = key.start_mark.line + 1
                _mark(value, below, document, seen)
    elif node.tag == "tag:yaml.org,2002:bool" and node.value.lower() in _SPELLED_BOOLEANS:
        document.spelled[path] = node.value
    elif node.tag in _NUMBERS and ":" in node.value:
        document.sixties[path] = node.value
    seen[id(node)] = False


def _explain_character(error: yaml.reader.ReaderError, text: str, origin: str) -> Problem:
    """A character that YAML allows nowhere, most often pasted along. PyYAML counts them from the start of the text."""
    before = text[: error.position]
    line, column = before.count("\n") + 1, error.position - (before.rfind("\n") + 1) + 1
    character = text[error.position] if error.position < len(text) else ""
    name = f"U+{ord(character):04X}" if character else "at the end"
    return Problem(f"a character that YAML does not allow ({name}, column {column}); delete it", origin, line)


def _explain(error: yaml.MarkedYAMLError, text: str, origin: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return Problem(f"not YAML: {error}", origin)
    lines = text.splitlines()
    written = lines[mark.line] if mark.line < len(lines) else ""
    problem = error.problem or str(error)
    indent = written[: len(written) - len(written.lstrip())]
    if "\t" in indent or problem.startswith("found character '\\t'"):
        text = f"a tab in {written.strip()!r}; YAML is indented with spaces only"
    elif "could not determine a constructor" in problem:
        text = "a `!tag` that builds an object; rule files hold plain values only"
    else:
        begun = error.context_mark
        earlier = f" ({error.context} begun on line {begun.line + 1})" if begun and begun.line != mark.line else ""
        near = f" near {written.strip()!r}" if written.strip() else ""
        text = f"not YAML{near}: {problem}{earlier}; check the indent, the colons and the quotes"
    return Problem(text, origin, mark.line + 1)
