"""Which module a rule gets: searched names, isinstance, both together, first match wins."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from ktransformers.injection import Plan, make_plan
from tests.injection.rules_of import EXPERTS, PACKING, make_rule
from tests.models import make_deepseek_v3, make_llama_dense, make_qwen2_moe, make_qwen3_moe


def _names(plan: Plan, rule: int = 1) -> list[str]:
    return [decision.name for decision in plan.of(plan.rules.rules[rule - 1])]


def _make_per_expert_tree() -> nn.Module:
    """The older layout, one module an expert: `layers.2.block_sparse_moe.experts.1.w1`."""
    expert = {"w1": nn.Linear(2, 2), "w2": nn.Linear(2, 2)}
    layers = [
        nn.ModuleDict(
            {"block_sparse_moe": nn.ModuleDict({"experts": nn.ModuleList(nn.ModuleDict(expert) for _ in range(3))})}
        )
        for _ in range(3)
    ]
    return nn.ModuleDict({"layers": nn.ModuleList(layers)})


def test_the_name_is_searched_in_the_dotted_path() -> None:
    plan = make_plan([make_rule(r"\.1\.mlp\.experts")], make_qwen3_moe())
    assert _names(plan) == ["model.layers.1.mlp.experts", "model.layers.1.mlp.experts.act_fn"]


def test_the_class_is_an_isinstance_test() -> None:
    plan = make_plan([make_rule(of="torch.nn.modules.module.Module", to="default")], make_qwen3_moe())
    assert len(plan.decisions) == sum(1 for _ in make_qwen3_moe().modules()) - 1  # all but the root
    linears = make_plan([make_rule(of="torch.nn.Linear", to="default")], make_llama_dense())
    assert {decision.class_name for decision in linears.decisions} == {"Linear"}


def test_name_and_class_must_both_hold() -> None:
    plan = make_plan([make_rule(r"layers\.1\.", of="torch.nn.Linear", to="default")], make_qwen3_moe())
    assert _names(plan) == [f"model.layers.1.self_attn.{p}_proj" for p in "qkvo"]


def test_the_root_is_never_replaced() -> None:
    model = make_qwen3_moe()
    plan = make_plan([make_rule(of="transformers.PreTrainedModel")], model)
    assert _names(plan) == ["model"]  # the inner Qwen3MoeModel; the root is one as well


def test_the_first_rule_that_matches_wins() -> None:
    special = make_rule(r"^model\.layers\.1\.mlp\.experts$", PACKING, backend="INT8")
    plan = make_plan([special, make_rule(EXPERTS, PACKING)], make_qwen3_moe())
    assert (_names(plan, 1), _names(plan, 2)) == (["model.layers.1.mlp.experts"], ["model.layers.2.mlp.experts"])
    assert [dict(decision.kwargs) for decision in plan.replacements] == [{"backend": "INT8"}, {}]


def test_default_takes_a_module_out_of_later_rules() -> None:
    keep = {"match": {"name": r"layers\.1\..*experts$"}, "replace": {"kwargs": {"generate_device": "cpu"}}}
    plan = make_plan([keep, make_rule(EXPERTS)], make_qwen3_moe())
    assert [decision.name for decision in plan.replacements] == ["model.layers.2.mlp.experts"]
    assert dict(plan.decisions[0].kwargs) == {"generate_device": "cpu"}
    assert plan.decisions[0].operator is None
    assert plan.unmatched_experts == ()  # kept on purpose


def test_not_recursive_leaves_everything_below_alone() -> None:
    alone = make_rule(r"^model\.layers\.1$", "default", recursive=False)
    plan = make_plan([alone, make_rule(EXPERTS)], make_qwen3_moe())
    assert _names(plan, 2) == ["model.layers.2.mlp.experts"]
    assert plan.unmatched_experts == ()


def test_not_recursive_does_not_reach_a_sibling_whose_name_begins_alike() -> None:
    model = nn.ModuleDict(
        {"head": nn.ModuleDict({"a": nn.Identity()}), "head_norm": nn.ModuleDict({"a": nn.Identity()})}
    )
    rules = [make_rule(r"^head$", "default", recursive=False), make_rule(r"\.a$", "default")]
    assert _names(make_plan(rules, model), 2) == ["head_norm.a"]


def test_children_of_a_replaced_module_are_matched_too() -> None:
    rules = [make_rule(r"layers\.1\.mlp$"), make_rule(r"layers\.1\.mlp\.experts$")]
    plan = make_plan(rules, make_qwen3_moe())
    assert [decision.name for decision in plan.replacements] == ["model.layers.1.mlp", "model.layers.1.mlp.experts"]


def test_layer_one_is_not_layer_ten() -> None:
    model = make_qwen3_moe(num_hidden_layers=12, hidden_size=16)
    plan = make_plan([make_rule(r"layers\.1\.mlp\.experts$")], model)
    assert _names(plan) == ["model.layers.1.mlp.experts"]
    assert plan.unmatched_experts == tuple(f"model.layers.{i}.mlp.experts" for i in range(2, 12))


def test_a_rule_for_layer_one_does_not_hit_expert_one_of_other_layers() -> None:
    plan = make_plan([make_rule(r"^layers\.1\..*\.w\d$", "default")], _make_per_expert_tree())
    assert len(_names(plan)) == 6
    assert all(name.startswith("layers.1.") for name in _names(plan))


@pytest.mark.parametrize(("make", "layers"), [(make_qwen2_moe, [0, 1, 2]), (make_deepseek_v3, [1, 2])])
def test_a_pattern_that_ends_in_experts_does_not_reach_shared_experts(make: Any, layers: list[int]) -> None:
    plan = make_plan([make_rule(r"\.experts$")], make())
    assert _names(plan) == [f"model.layers.{layer}.mlp.experts" for layer in layers]


def test_experts_that_no_rule_matches_are_listed() -> None:
    plan = make_plan([make_rule(r"layers\.2\.mlp\.experts$")], make_qwen3_moe())
    assert plan.unmatched_experts == ("model.layers.1.mlp.experts",)
    assert "experts that no rule matches: model.layers.1.mlp.experts" in str(plan)


def test_the_plan_reads_as_one_line_a_rule() -> None:
    rules = [make_rule(EXPERTS, PACKING), make_rule("lm_head", "default")]
    assert str(make_plan(rules, make_qwen3_moe())).splitlines() == [
        "<python>: rule 1: model.layers.N.mlp.experts, N = 1–2 → Packing",
        "<python>: rule 2: lm_head kept",
    ]


def test_planning_changes_nothing() -> None:
    model = make_qwen3_moe()
    before = {name: id(module) for name, module in model.named_modules()}
    make_plan([make_rule(EXPERTS, PACKING)], model)
    assert {name: id(module) for name, module in model.named_modules()} == before
