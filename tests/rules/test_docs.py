"""Every snippet of docs/rules.md does what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ktransformers.errors import RuleFileError
from ktransformers.injection import build_meta_model, make_plan
from ktransformers.rules import catalog, default_rules_for, load_rules, parse_rules, shipped_rules
from tests.models import make_qwen3_moe

_PAGE = (Path(__file__).parents[2] / "docs" / "rules.md").read_text(encoding="utf-8")


def _snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", _PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("text", _snippets("yaml"))
def test_a_yaml_snippet_is_a_rule_file_that_fits_a_model(text: str) -> None:
    plan = make_plan(parse_rules(text), make_qwen3_moe())
    assert [decision.name for decision in plan.replacements] == [f"model.layers.{i}.mlp.experts" for i in (1, 2)]


def test_the_first_match_of_the_order_snippet_wins() -> None:
    plan = make_plan(parse_rules(_snippets("yaml")[1]), make_qwen3_moe())
    assert [decision.kwargs["backend"] for decision in plan.replacements] == ["AMXBF16", "AMXINT8"]


def test_the_python_snippets_run_one_after_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_qwen3_moe()
    model.config.save_pretrained(tmp_path)
    before = list(model.named_modules())
    scope = {"MODEL": tmp_path, "model": model}
    planning, applying, objects = _snippets("python")
    exec(planning, scope)
    assert capsys.readouterr().out == _snippets("text")[1]
    exec(applying, scope)
    assert "KTransformersExperts" in capsys.readouterr().out
    assert list(model.named_modules()) == before
    exec(objects, scope)
    assert len(make_plan(scope["rules"], build_meta_model(model.config)).replacements) == 2  # type: ignore[arg-type]


def test_the_error_snippet_is_what_is_said() -> None:
    keep = "  replace: {class: default}\n"
    text = f"- match:\n\n    nam: x\n{keep}\n\n\n- match:\n    name: '('\n{keep}"
    with pytest.raises(RuleFileError) as caught:
        parse_rules(text, "my.yaml")
    assert f"{caught.value}\n" == _snippets("text")[0]


def test_the_table_lists_the_shipped_files_and_their_model_types() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \|", _PAGE.split("## Shipped files")[1], flags=re.MULTILINE)
    assert {name for name, _ in rows} == {shipped.name for shipped in shipped_rules()}
    listed = {kind for _, kinds in rows for kind in re.findall(r"`(\w+)`", kinds)}
    assert listed == set(catalog._BY_MODEL_TYPE)
    for name, kinds in rows:
        for kind in re.findall(r"`(\w+)`", kinds):
            assert default_rules_for(kind).stem == name.removesuffix("-serve-amx")
            assert load_rules(name)
