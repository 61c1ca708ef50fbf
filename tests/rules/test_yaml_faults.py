"""Files that are not what YAML or a rule file wants: each fault is named with its line, and nothing else is raised."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktransformers.errors import RuleFileError
from ktransformers.rules import load_rules, parse_rules

_MATCH = "- match: {name: x}\n"


def _error_of(text: str) -> RuleFileError:
    with pytest.raises(RuleFileError) as caught:
        parse_rules(text, "my.yaml")
    return caught.value


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("- match:\n\tname: x\n", 2, "a tab"),
        ("- match:\n    name: x\n  replace:\n   class: default\n    kwargs: {}\n", 5, "check the indent"),
        ("- match: {name: x}\n replace: {class: default}\n", 2, "check the indent"),
        ("- match: {name: x\n  replace: {class: default}\n", 2, "begun on line 1"),
        ("- match: {name: 'x}\n  replace: {class: default}\n", 3, "begun on line 1"),
        ('- match: {name: "^model\\.layers"}\n', 1, "escape"),
        ("a\n---\nb\n", 2, "another document"),
        ("- match: {name: *nowhere}\n", 1, "undefined alias"),
        ("&a [*a]\n", 1, "contains it"),
        ("- !!python/object/apply:os.getcwd []\n", 1, "builds an object"),
        ("- !mine {}\n", 1, "builds an object"),
        ("- {[a]: b}\n", 1, "unhashable"),
    ],
)
def test_broken_yaml_is_reported_with_its_line(text: str, line: int, said: str) -> None:
    error = _error_of(text)
    assert (error.path, error.line) == ("my.yaml", line)
    assert said in str(error)
    assert str(error).startswith(f"my.yaml:{line}: ")


@pytest.mark.parametrize(
    "text", ["[" * 2000, "- " * 2000, "- !!int x", "- 2024-99-99", "- !!float y", "\x00", "- !!bool q"]
)
def test_values_that_pyyaml_itself_trips_over(text: str) -> None:
    assert "my.yaml" in str(_error_of(text))


@pytest.mark.parametrize(
    ("text", "key", "first", "second"),
    [
        ("- match:\n    name: x\n    name: y\n  replace: {class: default}\n", "name", 2, 3),
        ("- match: {name: x}\n  replace: {class: default}\n  match: {name: y}\n", "match", 1, 3),
        (f"{_MATCH}  replace:\n    class: default\n    kwargs:\n      a: 1\n      a: 2\n", "a", 5, 6),
        (f"{_MATCH}  replace: {{class: default, class: b.C}}\n", "class", 2, 2),
    ],
)
def test_a_key_given_twice_is_refused_with_both_lines(text: str, key: str, first: int, second: int) -> None:
    error = _error_of(text)
    assert error.line == second
    assert f"`{key}` is given twice (first on line {first})" in str(error)


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "[]", "---\n"])
def test_a_file_without_rules_is_no_rule_file(text: str) -> None:
    assert "no rules" in str(_error_of(text))


def test_a_long_chain_of_aliases_does_not_expand() -> None:
    levels = "\n".join(f"- &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40))
    assert "rule 1" in str(_error_of(f"- &a0 [x]\n{levels}\n"))


def test_a_file_that_is_not_utf8_says_so(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"# caf\xe9\n- match: {name: x}\n")
    with pytest.raises(RuleFileError, match="UTF-8"):
        load_rules(path)


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + f"{_MATCH}  replace: {{class: default}}\n".encode())
    assert len(load_rules(path)) == 1


def test_a_file_that_may_not_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "closed.yaml"
    path.write_text(_MATCH)

    def _refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", _refuse)
    with pytest.raises(RuleFileError, match="Permission denied"):
        load_rules(path)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("- match: {name: x}\n  replace: {class: a\x07.B}\n", 2, "(U+0007, column 21)"),
        ("\x00", 1, "(U+0000, column 1)"),
        ("- match:\r\n    name: x\x1b\r\n", 2, "(U+001B, column 12)"),
    ],
)
def test_a_control_character_is_named_with_its_line_and_column(text: str, line: int, said: str) -> None:
    error = _error_of(text)
    assert error.line == line
    assert f"a character that YAML does not allow {said}; delete it" in str(error)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ("{threads: 1:30}", "`threads: 1:30` is 90 in YAML, which counts in sixties there; write that number"),
        ("{a: [1, 1:30.5]}", "`a: 1:30.5` is 90.5 in YAML"),
    ],
)
def test_a_number_in_sixties_says_what_yaml_made_of_it(kwargs: str, said: str) -> None:
    error = _error_of(f"{_MATCH}  replace: {{class: a.B, kwargs: {kwargs}}}\n")
    assert error.line == 2
    assert said in str(error)


def test_a_colon_in_quotes_is_text() -> None:
    (rule,) = parse_rules(_MATCH + "  replace: {class: a.B, kwargs: {device: \"cuda:0\", at: '1:30'}}\n")
    assert rule.kwargs == {"device": "cuda:0", "at": "1:30"}
