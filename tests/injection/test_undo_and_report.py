"""The report tells what was replaced by what, and takes it back exactly."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from ktransformers.errors import UndoError
from ktransformers.injection import Report, apply_plan, is_injected, make_plan
from tests.injection.rules_of import EXPERTS, PACKING, make_rule
from tests.models import make_qwen3_moe

_IDS = torch.arange(12)[None]


def _inject(model: nn.Module, *rules: dict[str, Any], **options: Any) -> Report:
    return apply_plan(make_plan(list(rules) or [make_rule(EXPERTS, PACKING, backend="INT8")], model), model, **options)


def test_undo_restores_the_same_objects_and_the_same_logits() -> None:
    model = make_qwen3_moe()
    logits = model(_IDS).logits
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    values = {name: tensor.clone() for name, tensor in parameters.items()}
    report = _inject(model)
    operator = model.model.layers[1].mlp.experts
    assert is_injected(operator)
    report.undo()
    assert not is_injected(operator)
    assert list(model.named_modules()) == list(modules.items())  # order included
    assert all(dict(model.named_parameters())[name] is tensor for name, tensor in parameters.items())
    assert all(torch.equal(parameters[name], value) for name, value in values.items())
    assert torch.equal(model(_IDS).logits, logits)


def test_undo_keeps_the_mode_the_model_is_in_now() -> None:
    model = make_qwen3_moe().train()
    report = _inject(model)
    model.eval()
    report.undo()
    assert not any(module.training for module in model.modules())


def test_undo_works_once() -> None:
    model = make_qwen3_moe()
    report = _inject(model)
    report.undo()
    with pytest.raises(UndoError, match="undone already"):
        report.undo()


def test_undo_without_floats_says_how_to_keep_them() -> None:
    model = make_qwen3_moe()
    report = _inject(model, keep_float=False)
    with pytest.raises(UndoError, match=r"experts, N = 1–2 were freed .*keep_float=True"):
        report.undo()
    model(_IDS)


def test_undo_does_not_tear_out_what_somebody_else_put_there() -> None:
    model = make_qwen3_moe()
    report = _inject(model)
    mine = model.model.layers[2].mlp.experts = nn.Identity()
    with pytest.raises(UndoError, match=r"model\.layers\.2\.mlp\.experts is not what this injection put there"):
        report.undo()
    assert model.model.layers[2].mlp.experts is mine
    assert type(model.model.layers[1].mlp.experts).__name__ == "Packing"


def test_the_text_has_one_line_for_all_equal_layers() -> None:
    report = _inject(make_qwen3_moe())
    assert str(report) == (
        "2 modules replaced by the rules of <python>\n"
        "  rule 1: model.layers.N.mlp.experts, N = 1–2: Qwen3MoeExperts → Packing (op Packing, backend INT8)"
    )


def test_experts_left_out_are_in_the_report() -> None:
    report = _inject(make_qwen3_moe(), make_rule(r"layers\.1\..*experts$"))
    assert report.unmatched_experts == ("model.layers.2.mlp.experts",)
    assert "experts that no rule matches: model.layers.2.mlp.experts" in str(report)
    assert "1 module replaced" in str(report)
    assert "(op PassThrough)" in str(report)


def test_a_start_names_rule_backend_and_what_runs_for_each_range_of_layers() -> None:
    rules = [
        make_rule(r"layers\.1\.mlp\.experts$", "default"),
        make_rule(r"layers\.2\.mlp\.experts$", "KTransformersExperts", backend="AVX2INT8", threads=1),
    ]
    report = _inject(make_qwen3_moe(num_hidden_layers=5), *rules, make_rule(r"layers\.3\..*experts$", PACKING))
    (tier,) = {r.details["tier"] for r in report.replacements if "tier" in r.details}
    runs = f"asked for AVX2INT8, runs INT8 on {tier}, 1 thread (KExpertsCPU)"
    assert report.lines() == [
        f"model.layers.2.mlp.experts: rule 2 (<python>): {runs}",
        "model.layers.3.mlp.experts: rule 3 (<python>): asked for auto, runs op Packing",
        "model.layers.1.mlp.experts: rule 1 keeps transformers' own",
        "model.layers.4.mlp.experts: no rule matches, transformers' own",
    ]


def test_equal_layers_share_a_line_unless_each_is_asked_for() -> None:
    report = _inject(make_qwen3_moe())
    said = "rule 1 (<python>): asked for INT8, runs op Packing"
    assert report.lines() == [f"model.layers.N.mlp.experts, N = 1–2: {said}"]
    assert report.lines(verbose=True) == [f"model.layers.{n}.mlp.experts: {said}" for n in (1, 2)]


def test_the_report_as_plain_data() -> None:
    rules = [make_rule("lm_head", "default"), make_rule(EXPERTS, PACKING)]
    data = json.loads(json.dumps(_inject(make_qwen3_moe(), *rules).as_dict()))
    assert data["rules"] == "<python>"
    assert data["counts"] == {"1": 1, "2": 2}
    assert data["floats_kept"] is True
    assert data["replacements"][0] == {
        "name": "model.layers.1.mlp.experts",
        "old_class": "Qwen3MoeExperts",
        "new_class": "Packing",
        "rule": 2,
        "details": {"op": "Packing", "backend": "auto", "bytes": "1"},
    }


def test_the_report_as_a_table() -> None:
    text = io.StringIO()
    Console(width=200, file=text).print(_inject(make_qwen3_moe()).table())
    assert "model.layers.N.mlp.experts, N = 1–2" in text.getvalue()
    assert "op Packing, backend INT8" in text.getvalue()


def test_nothing_is_printed_when_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    _inject(make_qwen3_moe())
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_progress_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # Rich then takes any stream for a terminal
    _inject(make_qwen3_moe())
    assert "Packing" in capsys.readouterr().err
    _inject(make_qwen3_moe(), progress=False)
    assert capsys.readouterr().err == ""
