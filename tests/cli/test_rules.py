"""`kt rules`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ktransformers.rules import find_rules, shipped_rules
from tests.cli.conftest import Kt

_RULE = """
- match:
    name: '{name}'
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs:
      backend: {backend}
"""


def test_list_names_every_shipped_file(kt: Kt) -> None:
    result = kt("rules", "list")
    assert result.exit_code == 0
    listed = [line.split()[0] for line in result.stdout.splitlines()[1:]]
    assert listed == [shipped.name for shipped in shipped_rules()]


def test_check_shows_count_and_first_names_of_each_rule(kt: Kt, moe_folder: str) -> None:
    result = kt("rules", "check", "Qwen3MoE", moe_folder, "--first", "1")
    assert result.exit_code == 0, result.stderr
    assert "Qwen3MoE.yaml:2: rule 1" in result.stdout
    assert "KTransformersExperts" in result.stdout
    assert "model.layers.1.mlp.experts" in result.stdout
    assert "… 1 more" in result.stdout
    assert "model.layers.2" not in result.stdout


def test_check_opens_no_weight_file(kt: Kt, moe_folder: str, tmp_path: Path) -> None:
    folder = tmp_path / "weightless"
    shutil.copytree(moe_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    assert kt("rules", "check", "moe", str(folder)).exit_code == 0


def test_check_lists_experts_that_no_rule_matches(kt: Kt, moe_folder: str, rule_file: Callable[[str], str]) -> None:
    result = kt("rules", "check", rule_file(_RULE.format(name=r"layers\.2\.mlp\.experts$", backend="INT8")), moe_folder)
    assert result.exit_code == 0
    assert "experts that no rule matches: model.layers.1.mlp.experts" in result.stdout


def test_a_rule_that_matches_nothing_fails_the_check(kt: Kt, moe_folder: str, rule_file: Callable[[str], str]) -> None:
    live = _RULE.format(name=r"mlp\.experts$", backend="INT8")
    dead = _RULE.format(name=r"block_sparse_moe\.experts$", backend="INT8")
    path = rule_file(live + dead)
    result = kt("rules", "check", path, moe_folder)
    assert result.exit_code == 2
    assert f"{path}:9: rule 2" in result.stderr
    assert "matches no module" in result.stderr
    assert r"try name: '^model\.layers\.\d+\.mlp\.experts$', which matches 2 modules here" in result.stderr
    assert "model.layers.2.mlp.experts" in result.stdout


def test_legacy_makes_a_rule_that_matches_nothing_a_warning(
    kt: Kt, moe_folder: str, rule_file: Callable[[str], str]
) -> None:
    live = _RULE.format(name=r"mlp\.experts$", backend="INT8")
    dead = _RULE.format(name=r"block_sparse_moe\.experts$", backend="INT8")
    path = rule_file(live + dead)
    result = kt("rules", "check", path, moe_folder, "--legacy")
    assert result.exit_code == 0
    assert f"warning: {path}:9: rule 2: matches no module" in result.stderr
    run = kt("run", moe_folder, "--rules", path, "--prompt", "a", "--max-new-tokens", "1")
    assert run.exit_code == 2
    assert "matches no module" in run.stderr
    run = kt("run", moe_folder, "--rules", path, "--prompt", "a", "--max-new-tokens", "1", "--legacy")
    assert run.exit_code == 0, run.stderr
    assert "matches no module" in run.stderr


def test_a_refused_backend_fails_the_check_with_its_place(
    kt: Kt, moe_folder: str, rule_file: Callable[[str], str]
) -> None:
    path = rule_file(_RULE.format(name=r"mlp\.experts$", backend="AMXIMT8"))
    result = kt("rules", "check", path, moe_folder)
    assert result.exit_code == 2
    assert f"{path}:2: rule 1" in result.stderr
    assert "AMXINT8" in result.stderr


def test_a_dense_model_is_told_that_there_is_nothing_to_replace(kt: Kt, dense_folder: str) -> None:
    result = kt("rules", "check", "moe", dense_folder)
    assert result.exit_code == 2
    assert "dense" in result.stderr


@pytest.mark.parametrize(("rules", "nearest"), [("Qwen3MoEE", "Qwen3MoE"), ("Mixtrall.yaml", "Mixtral")])
def test_a_misspelt_shipped_name_names_the_nearest(kt: Kt, moe_folder: str, rules: str, nearest: str) -> None:
    result = kt("rules", "check", rules, moe_folder)
    assert result.exit_code == 2
    assert nearest in result.stderr


def test_a_model_that_is_not_there_is_named(kt: Kt, tmp_path: Path) -> None:
    result = kt("rules", "check", "moe", str(tmp_path / "absent"))
    assert result.exit_code == 2
    assert str(tmp_path / "absent") in result.stderr


def test_show_prints_a_shipped_file_as_it_is_and_where_it_lies(kt: Kt) -> None:
    result = kt("rules", "show", "qwen3moe")
    path = find_rules("Qwen3MoE")
    assert result.exit_code == 0
    assert result.stdout == path.read_text()
    assert result.stderr == f"{path}\n"


def test_show_prints_a_file_that_is_malformed_too(kt: Kt, rule_file: Callable[[str], str]) -> None:
    path = rule_file("- match: {nam: x}")
    result = kt("rules", "show", path)
    assert (result.exit_code, result.stdout) == (0, "- match: {nam: x}\n")


def test_show_of_a_name_that_is_not_there_names_the_near_ones(kt: Kt) -> None:
    result = kt("rules", "show", "Mixtrall")
    assert result.exit_code == 2
    assert "did you mean Mixtral?" in result.stderr


def test_explain_goes_by_the_rules_of_the_models_type(kt: Kt, moe_folder: str) -> None:
    result = kt("rules", "explain", moe_folder, "model.layers.1.mlp.experts")
    assert result.exit_code == 0, result.stderr
    assert "model.layers.1.mlp.experts (Qwen3MoeExperts)" in result.stdout
    assert "Qwen3MoE.yaml:2: rule 1: takes it: becomes KTransformersExperts" in result.stdout


def test_explain_hears_every_rule_of_a_file(kt: Kt, moe_folder: str, rule_file: Callable[[str], str]) -> None:
    rules = rule_file(
        _RULE.format(name=r"layers\.1\..*experts$", backend="INT8") + _RULE.format(name="experts$", backend="BF16")
    )
    result = kt("rules", "explain", moe_folder, r"mlp\.experts$", "--rules", rules)
    assert result.exit_code == 0, result.stderr
    assert "would take it, but rule 1 was first" in result.stdout
    assert "is not found in it" in result.stdout


def test_explain_of_a_module_that_is_not_there(kt: Kt, moe_folder: str) -> None:
    result = kt("rules", "explain", moe_folder, "model.layers.1.mlp.experts.3")
    assert result.exit_code == 2
    assert "its experts are model.layers.N.mlp.experts, N = 1–2" in result.stderr
