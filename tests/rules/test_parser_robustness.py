"""Whatever the text, the parser gives rules or a RuleFileError."""

from __future__ import annotations

import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st

from ktransformers.errors import RuleFileError
from ktransformers.rules import Rule, load_rules, parse_rules

_GOOD = """- match:
    name: '^model\\.layers\\.\\d+\\.mlp\\.experts$'
    class: torch.nn.Module
  replace:
    class: my.package.Experts
    kwargs: &k
      generate_device: "cpu"
      threads: 4
  recursive: False
- match: {name: lm_head}
  replace: {class: default, kwargs: *k}
"""

_SIGNS = [
    "\t",
    " ",
    "\n",
    *"-:{}[]'\"#|",
    "&a ",
    "*a",
    "*k",
    "!!int ",
    "!x ",
    "? ",
    "<<: ",
    "---",
    "...",
    "\x07",
    "\ud800",
]
_WORDS = ["match", "name", "on", "no", "null", "1e9", "0o7", "12:30:45", "2024-02-31", "%YAML 9.9"]
_PIECES = st.sampled_from([*_SIGNS, *_WORDS])
_KEYS = st.sampled_from(["match", "replace", "name", "class", "kwargs", "recursive"]) | st.text(max_size=3)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=12,
)


@given(st.text(max_size=200))
@settings(max_examples=150, deadline=None)
def test_any_text(text: str) -> None:
    with contextlib.suppress(RuleFileError):
        assert all(isinstance(rule, Rule) for rule in parse_rules(text))


@given(st.lists(st.tuples(st.integers(0, len(_GOOD)), st.integers(0, 6), _PIECES), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_a_good_file_with_random_edits(edits: list[tuple[int, int, str]]) -> None:
    text = _GOOD
    for at, removed, piece in edits:
        text = text[:at] + piece + text[at + removed :]
    with contextlib.suppress(RuleFileError):
        assert all(isinstance(rule, Rule) for rule in parse_rules(text))


@given(st.lists(_VALUES, max_size=3))
@settings(max_examples=200, deadline=None)
def test_any_python_values(value: list[object]) -> None:
    with contextlib.suppress(RuleFileError):
        assert all(isinstance(rule, Rule) for rule in load_rules(value))


def test_the_text_the_edits_start_from_is_sound() -> None:
    assert len(parse_rules(_GOOD)) == 2
