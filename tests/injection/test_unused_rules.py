"""Rules that decide nothing are errors, by the real result of the pattern, with what was probably meant."""

from __future__ import annotations

from typing import Any

import pytest

from ktransformers.errors import RuleMatchError
from ktransformers.injection import apply_plan, make_plan
from ktransformers.injection.proposal import propose_pattern
from ktransformers.injection.tree import without_numbers
from ktransformers.rules import parse_rules
from tests.injection.rules_of import EXPERTS, make_rule
from tests.models import make_granite_moe, make_llama_dense, make_qwen3_moe


def _error_of(rules: list[dict[str, Any]], model: Any = None) -> str:
    with pytest.raises(RuleMatchError) as caught:
        make_plan(rules, model if model is not None else make_qwen3_moe())
    return str(caught.value)


def test_a_pattern_for_single_projections_finds_nothing_in_stacked_experts() -> None:
    error = _error_of([make_rule(r"^model\.layers\..*\.mlp\.experts\.\d+\.(gate|up|down)_proj$")])
    assert error.startswith("<python>: rule 1: matches no module of this model")
    assert "its experts are model.layers.N.mlp.experts, N = 1–2" in error
    assert "all experts of a layer in one module" in error


def test_a_pattern_whose_last_part_is_right_and_path_is_wrong_is_dead() -> None:
    error = _error_of([make_rule(r".*feed_forward\.experts$")])
    assert "matches no module" in error
    assert "its experts are model.layers.N.mlp.experts, N = 1–2" in error


def test_the_nearest_names_are_those_of_the_model_at_hand() -> None:
    assert "model.layers.N.block_sparse_moe.experts, N = 0–2" in _error_of([make_rule(EXPERTS)], make_granite_moe())
    error = _error_of([make_rule(EXPERTS), make_rule(r"^model\.layers\.\d+\.self_atn$")])
    assert "rule 2" in error
    assert "nearest names: model.layers.N.self_attn, N = 0–2" in error


def test_a_general_rule_above_a_special_one_shadows_it() -> None:
    error = _error_of([make_rule(r".*mlp\.experts$"), make_rule(r"^model\.layers\.1\.mlp\.experts$")])
    assert error == (
        "<python>: rule 2: never applies: rule 1 decided model.layers.1.mlp.experts first. The first match wins: put "
        "the special rule above the general one"
    )


def test_a_shadowed_rule_names_every_rule_in_its_way() -> None:
    rules = [make_rule(r"layers\.1\..*experts$"), make_rule(r"layers\.2\..*experts$"), make_rule(EXPERTS)]
    error = _error_of(rules)
    assert "rule 1 decided model.layers.1.mlp.experts first; rule 2 decided model.layers.2.mlp.experts first" in error


def test_a_rule_below_a_subtree_left_alone_says_which_rule_left_it() -> None:
    rules = [make_rule(r"^model\.layers$", "default", recursive=False), make_rule(EXPERTS)]
    assert "rule 1 leaves everything around model.layers.N.mlp.experts, N = 1–2 alone" in _error_of(rules)


def test_a_rule_that_loses_some_of_its_modules_is_fine() -> None:
    plan = make_plan([make_rule(r"layers\.1\..*experts$"), make_rule(EXPERTS)], make_qwen3_moe())
    assert len(plan.replacements) == 2


def test_name_and_class_that_never_meet_are_told_apart() -> None:
    error = _error_of([make_rule("lm_head", of="torch.nn.Embedding")])
    assert "`name` finds lm_head, but none is a torch.nn.Embedding (they are Linear)" in error
    error = _error_of([make_rule("lm_heat", of="torch.nn.Linear")])
    assert "`name` finds nothing; nearest names: lm_head" in error


def test_a_class_of_another_family_is_told_the_classes_there_are() -> None:
    error = _error_of([make_rule(of="transformers.models.mixtral.modeling_mixtral.MixtralExperts")])
    assert "nearest classes in it: transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts" in error


def test_the_error_names_file_line_and_rule() -> None:
    text = "# mine\n" + "".join(
        f"- match: {{name: {n}}}\n  replace: {{class: default}}\n" for n in ("lm_head", "exprts")
    )
    with pytest.raises(RuleMatchError) as caught:
        make_plan(parse_rules(text, "mine.yaml"), make_qwen3_moe())
    assert (caught.value.path, caught.value.line, caught.value.rule) == ("mine.yaml", 4, 2)


def test_a_dense_model_has_nothing_to_gain() -> None:
    error = _error_of([make_rule(EXPERTS)], make_llama_dense())
    assert "LlamaForCausalLM (model_type llama) is a dense model" in error
    assert "nothing to gain" in error


def test_a_dense_model_may_have_other_modules_replaced() -> None:
    plan = make_plan([make_rule("lm_head", "default")], make_llama_dense())
    assert [decision.name for decision in plan.decisions] == ["lm_head"]


def test_dead_rules_can_be_allowed_and_are_warnings_then(caplog: pytest.LogCaptureFixture) -> None:
    model = make_qwen3_moe()
    plan = make_plan([make_rule(EXPERTS), make_rule("nowhere")], model, allow_dead=True)
    assert len(plan.replacements) == 2
    assert "rule 2: matches no module" in plan.warnings[0]
    report = apply_plan(plan, model)
    assert "rule 2: matches no module" in caplog.text
    assert report.counts() == {1: 2, 2: 0}
    assert "rule 2: matches no module" in str(report)


@pytest.mark.parametrize(
    ("pattern", "proposed"),
    [
        (r"^model\.layers\..*\.mlp\.experts\.\d+\.(gate|up|down)_proj$", r"^model\.layers\.\d+\.mlp\.experts$"),
        (r".*block_sparse_moe\.experts$", r"^model\.layers\.\d+\.mlp\.experts$"),
        (r"^model\.layers\.2\.block_sparse_moe\.experts$", r"^model\.layers\.2\.mlp\.experts$"),
        (r"layers\.(0|[1-9])\.moe\.experts$", r"^model\.layers\.(0|[1-9])\.mlp\.experts$"),
        (r"layers\.77\.moe\.experts$", r"^model\.layers\.\d+\.mlp\.experts$"),
        (r"self_atn\.q_proj$", r"^model\.layers\.\d+\.self_attn\.q_proj$"),
    ],
)
def test_a_dead_rule_comes_with_a_pattern_that_matches(pattern: str, proposed: str) -> None:
    model = make_qwen3_moe()
    error = _error_of([make_rule(pattern)], model)
    assert f"try name: '{proposed}', which matches " in error
    plan = make_plan([make_rule(proposed)], model)
    assert f"which matches {len(plan.replacements)} module" in error
    (shape,) = {without_numbers(decision.name) for decision in plan.replacements}
    assert shape.rpartition(".")[2] in ("experts", "q_proj")


def test_a_proposal_for_a_name_and_a_class_finds_modules_of_that_class() -> None:
    error = _error_of([make_rule(r"self_atn\.k_prj$", of="torch.nn.Linear")])
    assert r"try name: '^model\.layers\.\d+\.self_attn\.k_proj$', which matches 3 modules here" in error


def test_nothing_is_proposed_where_nothing_is_near() -> None:
    assert "try name" not in _error_of([make_rule("^zzz$"), make_rule(EXPERTS)], make_llama_dense())


@pytest.mark.parametrize(
    ("targets", "pattern"),
    [
        (["a.1.x", "a.2.x"], r"^a\.\d+\.x$"),
        (["a.1.x", "a.1.y.0.x"], r"^(a\.1\.x|a\.1\.y\.0\.x)$"),
        (["a.1.x"], r"^a\.1\.x$"),
        (["a.1.x", "a.3.x"], r"^(a\.1\.x|a\.3\.x)$"),
    ],
)
def test_a_proposal_finds_its_targets_and_nothing_else(targets: list[str], pattern: str) -> None:
    names = {"a", "a.1", "a.1.x", "a.2.x", "a.1.y.0.x", "a.12.xx", "b.a.1.x", *targets}
    assert propose_pattern("meant", targets, names) == pattern


def test_without_targets_there_is_no_proposal() -> None:
    assert propose_pattern("meant", [], ["a.1.x"]) is None
