"""The rule format: what each key may hold, and what a wrong one is told."""

from __future__ import annotations

import pytest

from ktransformers.errors import RuleFileError
from ktransformers.rules import Rule, RuleSet, parse_rules

_COMPLETE = r"""
- match:
    name: '^model\.layers\.\d+\.mlp\.experts$'
    class: torch.nn.Module
  replace:
    class: my.package.Experts
    kwargs:
      generate_device: cpu
      transfer_map: {10: "cuda:1"}
  recursive: False
- match: {name: lm_head}
  replace: {class: default, kwargs: {generate_device: "cuda:0"}}
- match: {class: torch.nn.Linear}
  replace: {kwargs: {}}
"""


def _errors_of(text: str) -> list[str]:
    with pytest.raises(RuleFileError) as caught:
        parse_rules(text, "my.yaml")
    return str(caught.value).splitlines()


def test_every_key_arrives_in_the_rule() -> None:
    first, second, third = parse_rules(_COMPLETE, "my.yaml")
    assert first == Rule(
        name=r"^model\.layers\.\d+\.mlp\.experts$",
        module_class="torch.nn.Module",
        replacement="my.package.Experts",
        kwargs={"generate_device": "cpu", "transfer_map": {10: "cuda:1"}},
        recursive=False,
        origin="my.yaml",
        line=2,
        number=1,
    )
    assert (second.keeps, second.kwargs, second.recursive) == (True, {"generate_device": "cuda:0"}, True)
    assert (third.keeps, third.name, third.where) == (True, None, "my.yaml:13: rule 3")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("mach: {name: x}\n  replace: {class: default}", "unknown key `mach` in a rule; did you mean `match`?"),
        ("match: {nam: x}\n  replace: {class: default}", "unknown key `nam` in `match`; did you mean `name`?"),
        ("match: {name: x}\n  replace: {clas: a.B}", "unknown key `clas` in `replace`; did you mean `class`?"),
        ("match: {name: x}\n  replace: {class: a.B, kwarg: {}}", "did you mean `kwargs`?"),
        ("match: {name: x}\n  replace: {class: a.B}\n  recursiv: false", "did you mean `recursive`?"),
        ("match: {name: x}\n  replace: {class: a.B}\n  priority: 3", "the keys are `match`, `replace`, `recursive`"),
        ("match: {name: x}\n  replace: {class: a.B}\n  kwargs: {}", "it belongs in `replace`: check the indent"),
        ("match: {name: x}\n  replace: {class: a.B, recursive: false}", "it belongs beside `match`"),
        ("match: {name: x}\n  replace: {class: a.B}\n  on: 1", "put such a key in quotes"),
        ("replace: {class: a.B}", "`match` is missing"),
        ("match: {name: x}", "`replace` is missing"),
        ("match:\n  replace: {class: a.B}", "`match` is missing"),
        ("match: experts\n  replace: {class: a.B}", "`match` is a mapping, not 'experts'"),
        ("match: {name: x}\n  replace: default", "`replace` is a mapping, not 'default'"),
        ("match: {}\n  replace: {class: a.B}", "`match` needs `name`"),
        ("match: {name: ''}\n  replace: {class: a.B}", "would match every module"),
        ("match: {name: '('}\n  replace: {class: a.B}", "'(' is not a regular expression"),
        ("match: {name: '*experts'}\n  replace: {class: a.B}", "nothing to repeat"),
        ("match: {name: '[[0-9]]'}\n  replace: {class: a.B}", "Possible nested set"),
        ("match: {name: 7}\n  replace: {class: a.B}", "`match.name` is text, not 7"),
        ("match: {name: [a]}\n  replace: {class: a.B}", "`match.name` is text, not a list"),
        ("match: {name: null}\n  replace: {class: a.B}", "`match.name` is text, not nothing"),
        ("match: {class: torch nn}\n  replace: {class: a.B}", "`match.class` 'torch nn' is not a dotted path"),
        ("match: {name: x}\n  replace: {class: a..B}", "`replace.class` 'a..B' is not a dotted path"),
        ("match: {name: x}\n  replace: {class: a.B, kwargs: [1]}", "`replace.kwargs` is a mapping, not a list"),
        ("match: {name: x}\n  replace: {class: a.B, kwargs: {3: 1}}", "3 cannot be the name of an argument"),
        ("match: {name: x}\n  replace: {class: a.B, kwargs: {a-b: 1}}", "'a-b' cannot be the name of an argument"),
        ("match: {name: x}\n  replace: {class: a.B, kwargs: {key: 1}}", "`key` is given to every operator"),
        ("match: {name: x}\n  replace: {class: a.B}\n  recursive: 'no'", "`recursive` is true or false, not 'no'"),
    ],
)
def test_a_wrong_rule_is_told_what_and_what_instead(rule: str, said: str) -> None:
    errors = _errors_of(f"- {rule}\n")
    assert len(errors) == 1
    assert said in errors[0]
    assert errors[0].startswith("my.yaml:")
    assert ": rule 1: " in errors[0]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("match: {name: no}\n  replace: {class: a.B}", "YAML reads no as a boolean"),
        ("match: {name: x}\n  replace: {class: off}", "YAML reads off as a boolean"),
        ("match: {name: x}\n  replace: {class: a.B, kwargs: {backend: off}}", "`backend: off` is a boolean in YAML"),
        ("match: {name: x}\n  replace: {class: a.B, kwargs: {a: {b: [Yes]}}}", "write true"),
    ],
)
def test_on_and_off_that_yaml_turns_into_booleans_are_pointed_at(rule: str, said: str) -> None:
    (error,) = _errors_of(f"- {rule}\n")
    assert said in error


def test_off_is_a_plain_way_to_say_not_recursive() -> None:
    (rule,) = parse_rules("- match: {name: x}\n  replace: {class: default}\n  recursive: off\n")
    assert rule.recursive is False


def test_all_faults_of_a_file_come_in_one_error() -> None:
    text = "- match: {nam: x}\n- 3\n- match: {name: '('}\n  replace:\n    class: a b\n    kwarg: {}\n"
    errors = _errors_of(text)
    assert [error.split(": ")[0] for error in errors] == [
        "my.yaml:1", "my.yaml:1", "my.yaml:2", "my.yaml:3", "my.yaml:5", "my.yaml:6",
    ]  # fmt: skip
    assert [error.split(": ")[1] for error in errors] == ["rule 1"] * 2 + ["rule 2"] + ["rule 3"] * 3


@pytest.mark.parametrize("text", ["match: {name: x}\nreplace: {class: default}\n", "rules\n", "3"])
def test_the_top_level_is_a_list(text: str) -> None:
    (error,) = _errors_of(text)
    assert "the top level must be a list of rules" in error


def test_a_rule_file_that_uses_anchors_and_merges_is_read() -> None:
    text = """
- match: {name: a}
  replace:
    class: my.Op
    kwargs: &common {generate_device: cpu, backend: INT8}
- match: {name: b}
  replace:
    class: my.Op
    kwargs: {<<: *common, backend: BF16}
"""
    rules: RuleSet = parse_rules(text)
    assert [rule.kwargs["backend"] for rule in rules] == ["INT8", "BF16"]
    assert rules.rules[1].kwargs["generate_device"] == "cpu"
