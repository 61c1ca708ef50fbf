"""Why a module became what it becomes: each rule is heard."""

from __future__ import annotations

import pytest

from ktransformers.errors import RuleMatchError, UnknownModuleError
from ktransformers.injection import explain_modules
from tests.injection.rules_of import EXPERTS, make_rule
from tests.models import make_qwen3_moe


def test_the_winner_and_the_ones_that_came_too_late() -> None:
    rules = [make_rule("lm_head", "default"), make_rule(EXPERTS), make_rule(r"\.1\.mlp\.experts$", "default")]
    (one,) = explain_modules(rules, make_qwen3_moe(), "model.layers.1.mlp.experts")
    assert one.winner is not None
    assert one.winner.number == 2
    assert [text for _, text in one.verdicts] == [
        "does not match: `name` 'lm_head' is not found in it",
        "takes it: becomes PassThrough",
        "would take it, but rule 2 was first",
    ]
    assert str(one).splitlines()[0] == "model.layers.1.mlp.experts (Qwen3MoeExperts)"


def test_layers_that_are_treated_alike_are_told_together() -> None:
    rules = [make_rule(r"layers\.3\..*experts$", "default"), make_rule(EXPERTS)]
    told = explain_modules(rules, make_qwen3_moe(num_hidden_layers=5), r"mlp\.experts$")
    assert [one.names for one in told] == [
        ("model.layers.1.mlp.experts", "model.layers.2.mlp.experts", "model.layers.4.mlp.experts"),
        ("model.layers.3.mlp.experts",),
    ]
    assert "model.layers.N.mlp.experts, N = 1–2, 4 (Qwen3MoeExperts)" in str(told[0])
    assert "rule 1: takes it: kept as it is" in str(told[1])


def test_a_module_that_no_rule_takes_says_why() -> None:
    rules = [make_rule(EXPERTS), make_rule("self_attn", of="torch.nn.Embedding")]
    (one,) = explain_modules(rules, make_qwen3_moe(), "model.layers.0.self_attn")
    assert one.winner is None
    assert one.verdicts[1][1] == "does not match: it is a Qwen3MoeAttention, not a torch.nn.Embedding"
    assert "no rule takes it: it stays as it is" in str(one)


def test_a_module_below_one_that_is_left_alone() -> None:
    rules = [make_rule(r"^model\.layers\.1$", "default", recursive=False), make_rule(EXPERTS)]
    (one,) = explain_modules(rules, make_qwen3_moe(), "model.layers.1.mlp.experts")
    assert "rule 1 leaves everything around it alone" in one.verdicts[1][1]
    assert one.winner is None


def test_a_winner_whose_operator_refuses_the_module_is_told_so() -> None:
    (one,) = explain_modules([make_rule("lm_head", "KTransformersExperts")], make_qwen3_moe(), "lm_head")
    assert one.winner is not None
    assert "  refused: " in str(one)
    (one,) = explain_modules([make_rule("lm_head", "KTransformersExprts")], make_qwen3_moe(), "lm_head")
    assert "Did you mean" in one.problems[0]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("model.layers.1.mlp.expert", None),
        ("model.layers.1.mlp.experts.0.gate_proj", "its experts are model.layers.N.mlp.experts, N = 1–2"),
        ("lm_haed", "nearest names: lm_head"),
        ("*.experts", "no regular expression"),
        ("", "no module of this model"),
    ],
)
def test_a_name_that_is_not_there_names_the_near_ones(wanted: str, said: str | None) -> None:
    if said is None:  # it is also a pattern, which finds the experts
        assert explain_modules([make_rule(EXPERTS)], make_qwen3_moe(), wanted)
        return
    with pytest.raises(UnknownModuleError, match="no module") as caught:
        explain_modules([make_rule(EXPERTS)], make_qwen3_moe(), wanted)
    assert said in str(caught.value)


def test_a_class_that_cannot_be_imported_is_the_rules_problem() -> None:
    with pytest.raises(RuleMatchError, match=r"match\.class"):
        explain_modules([make_rule(of="torch.nn.Linnear")], make_qwen3_moe(), "lm_head")
