"""The shipped rule files: found by name or path, from a source tree or an installed package."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ktransformers.errors import RuleNotFoundError
from ktransformers.rules import catalog, default_rules_for, find_rules, load_rules, rules_folder, shipped_rules

_NAMES = {"cpu-only", "DeepSeek-V3", "Mixtral", "moe", "OLMoE", "Qwen2MoE", "Qwen3MoE", "Qwen3MoE-serve-amx"}


def test_every_shipped_file_is_listed_and_read() -> None:
    assert {shipped.name for shipped in shipped_rules()} == _NAMES
    for shipped in shipped_rules():
        assert load_rules(shipped.name).origin == shipped.path.name


@pytest.mark.parametrize("name", ["Mixtral", "Mixtral.yaml", "mixtral", "MIXTRAL.YAML"])
def test_a_bare_name_finds_a_shipped_file(name: str) -> None:
    assert find_rules(name) == rules_folder() / "Mixtral.yaml"


def test_a_path_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "moe.yaml"
    mine.write_text("- match: {name: x}\n  replace: {class: default}\n")
    assert find_rules(mine) == mine
    assert load_rules(str(mine)).origin == str(mine)
    monkeypatch.chdir(tmp_path)
    assert find_rules("moe.yaml") == Path("moe.yaml")  # the file that lies here, not the shipped one
    assert find_rules("moe") == rules_folder() / "moe.yaml"


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("- match: {name: x}\n  replace: {class: default}\n")
    assert find_rules("~/mine.yaml") == tmp_path / "mine.yaml"


@pytest.mark.parametrize("name", ["Mixtrl", "mixtrall.yaml"])
def test_a_misspelt_name_is_told_the_nearest(name: str) -> None:
    with pytest.raises(RuleNotFoundError, match="did you mean Mixtral"):
        find_rules(name)


def test_a_misspelt_path_is_told_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "experts.yaml").touch()
    with pytest.raises(RuleNotFoundError, match="did you mean experts"):
        find_rules(tmp_path / "expert.yaml")
    with pytest.raises(RuleNotFoundError, match=r"there is no folder .*; shipped: .*Mixtral"):
        find_rules(tmp_path / "nowhere" / "x.yaml")


def test_a_folder_is_no_rule_file(tmp_path: Path) -> None:
    with pytest.raises(RuleNotFoundError, match="is a folder"):
        load_rules(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("qwen3_moe", "Qwen3MoE.yaml"),
        ("qwen2_moe", "Qwen2MoE.yaml"),
        ("mixtral", "Mixtral.yaml"),
        ("deepseek_v3", "DeepSeek-V3.yaml"),
        ("olmoe", "OLMoE.yaml"),
        ("granitemoe", "moe.yaml"),
        ("llama", "moe.yaml"),
        (None, "moe.yaml"),
    ],
)
def test_the_model_type_picks_the_file(model_type: str | None, name: str) -> None:
    assert default_rules_for(model_type) == rules_folder() / name


def test_an_installed_package_brings_its_files_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "ktransformers"
    (package / "rules").mkdir(parents=True)
    (package / "optimize_rules").mkdir()
    (package / "optimize_rules" / "moe.yaml").write_text("# Mine\n- match: {name: x}\n  replace: {class: default}\n")
    monkeypatch.setattr(catalog, "__file__", str(package / "rules" / "catalog.py"))
    assert [(shipped.name, shipped.summary) for shipped in shipped_rules()] == [("moe", "Mine")]


def test_an_installation_without_its_files_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "__file__", str(tmp_path / "ktransformers" / "rules" / "catalog.py"))
    with pytest.raises(RuleNotFoundError, match=r"looked in .*ktransformers/optimize_rules"):
        find_rules("moe")


def test_every_shipped_file_says_what_it_is_for() -> None:
    summaries = {shipped.name: shipped.summary for shipped in shipped_rules()}
    assert all(summaries.values())
    assert "backend AMXINT8" in summaries["Qwen3MoE-serve-amx"]


def test_an_empty_name_lists_the_shipped_files() -> None:
    with pytest.raises(RuleNotFoundError, match=r"name of the rule file is empty; .*Mixtral\.yaml"):
        find_rules("")


def test_a_pipe_is_read_like_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("- match: {name: x}\n  replace: {class: default}\n",))
    writer.start()
    assert len(load_rules(pipe)) == 1
    writer.join()
