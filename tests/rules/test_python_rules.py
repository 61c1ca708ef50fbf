"""Rules written in Python: dictionaries in the shape of the file, `Rule` objects, or both."""

from __future__ import annotations

import pytest

from ktransformers.errors import RuleFileError, RuleNotFoundError
from ktransformers.rules import Rule, load_rules, parse_rules


def test_dictionaries_go_through_the_same_checks() -> None:
    with pytest.raises(RuleFileError) as caught:
        load_rules([{"match": {"name": "x"}, "replace": {"clss": "a.B"}}])
    assert str(caught.value) == "<python>: rule 1: unknown key `clss` in `replace`; did you mean `class`?"
    assert (caught.value.line, caught.value.rule) == (None, 1)


def test_dictionaries_and_rule_objects_mix_and_are_numbered_in_order() -> None:
    rules = load_rules([{"match": {"name": "x"}, "replace": {"class": "default"}}, Rule(name="y", replacement="a.B")])
    assert [(rule.name, rule.number, rule.origin) for rule in rules] == [("x", 1, "<python>"), ("y", 2, "<python>")]


def test_a_rule_taken_from_a_file_keeps_its_place_there() -> None:
    (from_file,) = parse_rules("- match: {name: x}\n  replace: {class: default}\n", "my.yaml")
    assert load_rules([Rule(name="first"), from_file]).rules[1] is from_file


def test_a_rule_set_is_returned_as_it_is() -> None:
    rules = load_rules([Rule(name="x")])
    assert load_rules(rules) is rules


@pytest.mark.parametrize("source", [3, None, {"match": {"name": "x"}}, b"- match", {1, 2}])
def test_anything_else_is_refused_by_its_type(source: object) -> None:
    with pytest.raises(RuleFileError, match=type(source).__name__):
        load_rules(source)


def test_an_empty_list_holds_no_rules() -> None:
    with pytest.raises(RuleFileError, match="no rules"):
        load_rules([])


def test_rules_given_as_text_point_to_parse_rules() -> None:
    with pytest.raises(RuleNotFoundError, match="parse_rules"):
        load_rules("- match: {name: x}\n  replace: {class: default}\n")


def test_a_rule_that_could_match_anything_or_nothing_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="needs a `name` pattern or a `module_class`"):
        Rule(replacement="a.B")
    with pytest.raises(ValueError, match="not a regular expression"):
        Rule(name="(")


def test_name_patterns_are_searched_not_anchored() -> None:
    assert Rule(name="experts").matches_name("model.layers.0.mlp.experts.act_fn")
    assert not Rule(name="experts$").matches_name("model.layers.0.mlp.experts.act_fn")
    assert Rule(module_class="torch.nn.Linear").matches_name("anything")
