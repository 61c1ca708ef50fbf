"""Classes, ops, arguments and modules that do not go together are refused while planning, all of them at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ktransformers.errors import RuleMatchError
from ktransformers.injection import apply_plan, make_plan
from tests.injection.operators import Packing
from tests.injection.rules_of import EXPERTS, PACKING, PASS_THROUGH, make_rule
from tests.models import make_qwen3_moe


def _error_of(*rules: dict[str, Any], model: nn.Module | None = None) -> str:
    with pytest.raises(RuleMatchError) as caught:
        make_plan(list(rules), model or make_qwen3_moe())
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere.at.all.Experts", "there is no module `nowhere`"),
        ("torch.nn.Linar", "torch.nn has no `Linar`; did you mean Linear"),
        ("torch.nnn.Linear", "torch has no `nnn`"),
        ("tests.injection.operators.PassTrough", "did you mean PassThrough"),
        ("torch.nn.functional.linear", "not a class but a builtin_function_or_method"),
        ("collections.OrderedDict", "is no torch.nn.Module"),
        ("torch.nn.Linear", "does not take key, gguf_loader, config, orig_module"),
        ("ktransformers.operators.experts.DoesNotExist", "there is no operator"),
        ("KTransformerExperts", "Did you mean KTransformersExperts"),
    ],
)
def test_a_class_that_cannot_be_put_in(path: str, said: str) -> None:
    error = _error_of(make_rule(EXPERTS, path))
    assert error.startswith("<python>: rule 1: ")
    assert said in error


def test_a_class_to_match_that_cannot_be_imported() -> None:
    assert "`match.class`: torch.nn has no `Lineer`; did you mean Linear" in _error_of(
        make_rule("x", of="torch.nn.Lineer")
    )
    assert "`Linear` is a bare name" in _error_of(make_rule("x", of="Linear"))


def test_a_module_that_fails_at_import_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_operators.py").write_text("raise OSError('libcuda.so is missing')\n")
    (tmp_path / "needy_operators.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    error = _error_of(make_rule(EXPERTS, "broken_operators.Op"))
    assert "importing broken_operators failed: OSError: libcuda.so is missing" in error
    error = _error_of(make_rule(EXPERTS, "needy_operators.Op"))
    assert "importing needy_operators failed: No module named 'not_installed_here'" in error
    assert "needy_operators" not in sys.modules


def test_a_nested_class_is_found() -> None:
    plan = make_plan([make_rule(EXPERTS, f"{__name__}.Outside.Inside")], make_qwen3_moe())
    assert plan.replacements[0].operator is Outside.Inside


def test_an_argument_the_constructor_does_not_have() -> None:
    error = _error_of(make_rule(EXPERTS, PASS_THROUGH, scal=2.0))
    assert "PassThrough has no argument `scal`; did you mean scale?" in error
    assert "(at model.layers.N.mlp.experts, N = 1–2)" in error


def test_an_argument_the_constructor_needs() -> None:
    assert "Demanding needs the argument `bits`" in _error_of(make_rule(EXPERTS, f"{__name__}.Demanding"))
    assert make_plan([make_rule(EXPERTS, f"{__name__}.Demanding", bits=8)], make_qwen3_moe()).replacements


def test_what_the_operator_objects_to_is_said_once_for_all_layers() -> None:
    error = _error_of(make_rule(EXPERTS, PACKING, backend="INT3"))
    assert error == (
        "<python>: rule 1: no backend 'INT3'; there are auto, INT8 (at model.layers.N.mlp.experts, N = 1–2)"
    )


def test_a_rule_aimed_at_the_block_instead_of_its_experts() -> None:
    assert "model.layers.1.mlp is no experts module" in _error_of(make_rule(r"layers\.1\.mlp$", PACKING))


def test_a_pattern_with_gate_in_it_does_not_take_the_router_by_accident() -> None:
    error = _error_of(make_rule(r".*gate.*", PACKING))
    assert "is no experts module" in error
    assert "model.layers.N.mlp.gate, N = 1–2" in error


def test_an_operator_whose_check_fails_is_a_problem_of_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def _fail(**_: object) -> list[str]:
        raise ZeroDivisionError("no shapes")

    monkeypatch.setattr(Packing, "check", _fail)
    assert "Packing.check failed: ZeroDivisionError: no shapes" in _error_of(make_rule(EXPERTS, PACKING))


def test_every_problem_comes_in_one_error() -> None:
    error = _error_of(
        make_rule("nowhere"),
        make_rule(r"layers\.1\.mlp\.experts$", PACKING, backend="INT3"),
        make_rule(r"layers\.2\.mlp\.experts$", "torch.nn.Linar"),
        make_rule("lm_head", of="torch.nn.Lineer"),
    )
    assert [line.split(": ")[1] for line in error.splitlines()] == ["rule 1", "rule 2", "rule 3", "rule 4"]


def test_a_module_that_was_injected_already_has_to_be_taken_back_first() -> None:
    model = make_qwen3_moe()
    report = apply_plan(make_plan([make_rule(EXPERTS)], model), model)
    with pytest.raises(RuleMatchError, match=r"was replaced by PassThrough already; take that back first"):
        make_plan([make_rule(EXPERTS, PACKING)], model)
    report.undo()
    assert make_plan([make_rule(EXPERTS, PACKING)], model).replacements


def test_layers_that_were_not_injected_can_be_injected_later() -> None:
    model = make_qwen3_moe()
    first = apply_plan(make_plan([make_rule(r"layers\.1\..*experts$")], model), model)
    plan = make_plan([make_rule(r"layers\.2\..*experts$", PACKING)], model)
    assert plan.unmatched_experts == ()
    second = apply_plan(plan, model)
    first.undo()
    second.undo()
    assert {type(model.model.layers[i].mlp.experts).__name__ for i in (1, 2)} == {"Qwen3MoeExperts"}


def test_one_module_at_two_places_needs_one_rule_for_both() -> None:
    model = make_qwen3_moe()
    model.model.layers[2].mlp.experts = model.model.layers[1].mlp.experts
    error = _error_of(make_rule(r"layers\.1\..*experts$"), model=model)
    assert "model.layers.1.mlp.experts and model.layers.2.mlp.experts are one and the same module" in error
    assert make_plan([make_rule(EXPERTS)], model).replacements


class Outside:
    class Inside(nn.Module):
        def __init__(self, key: str, gguf_loader: object, config: object, orig_module: nn.Module) -> None: ...


class Demanding(nn.Module):
    def __init__(self, key: str, gguf_loader: object, config: object, orig_module: nn.Module, bits: int) -> None: ...


def test_a_class_to_match_that_no_isinstance_can_ask_for() -> None:
    error = _error_of(make_rule(of="typing.Protocol"))
    assert error.startswith("<python>: rule 1: `match.class`: no module can be tested for being a typing.Protocol")


def test_a_pattern_without_an_end_is_told_to_end_it() -> None:
    error = _error_of(make_rule(r"\.experts", "KTransformersExperts"))
    assert "SiLUActivation is no experts module" in error
    assert "the rule finds model.layers.1.mlp.experts and what lies below it: end the pattern with `$`" in error
