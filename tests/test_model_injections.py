"""Injections as programs do them: more than one, into wrapped models, into parts, from several threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import ktransformers
from ktransformers.errors import InjectionError, RuleMatchError, UndoError
from ktransformers.injection import apply_plan, make_plan
from ktransformers.operators.experts import KTransformersExperts
from ktransformers.operators.linear import KTransformersLinear
from tests import models

IDS = torch.arange(3, 23).view(1, 20)
EXPERTS = {"match": {"name": r"\.experts$"}, "replace": {"class": "KTransformersExperts"}}
HEAD = {"match": {"name": r"(^|\.)lm_head$"}, "replace": {"class": "KTransformersLinear"}}


class BaseTuner(nn.Module):
    """Nests a model as PEFT does: everything is at `base_model.model.…`, and a tuned layer holds its own as
    `base_layer`.
    """

    def __init__(self, model: PreTrainedModel, tuned: list[str]) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model
        self.config = model.config
        for name in tuned:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, LowRank(model.get_submodule(name)))

    def forward(self, ids: torch.Tensor) -> Any:
        return self.base_model.model(ids)


class LowRank(nn.Module):
    def __init__(self, base_layer: Any) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x))
        return result


def _logits(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(IDS).logits
    return logits


def _close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median() < 0.02)


def test_the_same_rules_twice_are_refused_and_change_nothing() -> None:
    model = models.make_qwen3_moe()
    report = ktransformers.inject(model, "cpu-only")
    logits = _logits(model)
    with pytest.raises(RuleMatchError, match="lm_head was replaced by KTransformersLinear already"):
        ktransformers.inject(model, "cpu-only")
    assert torch.equal(_logits(model), logits)
    report.undo()
    again = ktransformers.inject(model, "cpu-only")
    assert torch.equal(_logits(model), logits)
    again.undo()


def test_a_second_injection_adds_what_the_first_left_and_each_is_undone_alone() -> None:
    model = models.make_qwen3_moe()
    eager = _logits(model)
    experts = ktransformers.inject(model, [EXPERTS])
    only_experts = _logits(model)
    head = ktransformers.inject(model, [HEAD])
    assert isinstance(model.lm_head, KTransformersLinear)
    experts.undo()
    assert not any(isinstance(module, KTransformersExperts) for module in model.modules())
    assert not torch.equal(_logits(model), eager)
    head.undo()
    assert torch.equal(_logits(model), eager)
    assert not torch.equal(only_experts, eager)


def test_rules_for_a_model_find_it_inside_of_pefts_wrapper_and_leave_adapters_alone() -> None:
    model = models.make_qwen3_moe()
    tuned = [f"model.layers.{n}.self_attn.q_proj" for n in range(3)]
    wrapped = BaseTuner(model, tuned).eval().requires_grad_(False)
    eager = _logits(wrapped)
    report = ktransformers.inject(wrapped, "cpu-only")
    names = {r.name for r in report.replacements}
    assert "base_model.model.model.layers.1.mlp.experts" in names
    assert "base_model.model.lm_head" in names
    assert "base_model.model.model.layers.0.self_attn.q_proj.base_layer" in names
    assert _close(_logits(wrapped), eager)
    report.undo()
    assert torch.equal(_logits(wrapped), eager)
    anchored = {"match": {"name": r"^model\.layers\.\d+\.mlp\.experts$"}, "replace": EXPERTS["replace"]}
    with pytest.raises(RuleMatchError, match=r"its experts are base_model\.model\.model\.layers\.N\.mlp\.experts"):
        ktransformers.inject(wrapped, [anchored])


def test_a_sub_module_is_injected_by_its_own_names_and_undone_alone() -> None:
    model = models.make_qwen3_moe()
    eager = _logits(model)
    rule = {"match": {"name": r"^layers\.\d+\.mlp\.experts$"}, "replace": EXPERTS["replace"]}
    report = ktransformers.inject(model.model, [rule])
    assert [r.name for r in report.replacements] == ["layers.1.mlp.experts", "layers.2.mlp.experts"]
    assert _close(_logits(model), eager)
    with pytest.raises(RuleMatchError, match="was replaced by KTransformersExperts already"):
        ktransformers.inject(model, [EXPERTS])
    report.undo()
    assert torch.equal(_logits(model), eager)


def test_one_range_of_layers_is_that_range_to_the_digit() -> None:
    model = models.make_qwen3_moe(num_hidden_layers=12, hidden_size=16, mlp_only_layers=[])
    wanted = {"(0|[1-9])": range(10), "(1[0-9])": range(10, 12), "1": range(1, 2)}
    for layers, numbers in wanted.items():
        rule = {"match": {"name": rf"^model\.layers\.{layers}\..*experts$"}, "replace": EXPERTS["replace"]}
        report = ktransformers.inject(model, [rule])
        assert [r.name for r in report.replacements] == [f"model.layers.{n}.mlp.experts" for n in numbers]
        report.undo()


def test_hooks_on_a_linear_go_along_and_come_back() -> None:
    model = models.make_qwen3_moe()
    seen: list[str] = []
    handle = model.lm_head.register_forward_hook(lambda module, _, __: seen.append(type(module).__name__))
    model.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 0,))
    report = ktransformers.inject(model, [HEAD])
    assert not _logits(model).any()
    report.undo()
    assert not _logits(model).any()
    assert seen == ["KTransformersLinear", "Linear"]
    handle.remove()
    _logits(model)
    assert len(seen) == 2


def test_undo_gives_back_what_requires_gradients_and_what_does_not() -> None:
    model = models.make_qwen3_moe()
    model.lm_head.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert set(before.values()) == {True, False}
    report = ktransformers.inject(model, "cpu-only")
    report.undo()
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before


def test_after_undo_a_model_trains_again() -> None:
    model = models.make_qwen3_moe()
    report = ktransformers.inject(model, "cpu-only")
    model.train()
    model.activation_checkpointing_enable()
    with pytest.raises(RuntimeError, match="computes no gradients"):
        model(IDS)
    model.activation_checkpointing_disable()
    with pytest.raises(RuntimeError, match="computes no gradients: call the model under"):
        model(IDS)
    report.undo()
    model(IDS, labels=IDS).loss.backward()
    assert model.lm_head.weight.grad is not None
    assert model.model.layers[1].mlp.experts.down_proj.grad.abs().sum() > 0


def test_undo_without_floats_says_how_to_keep_them() -> None:
    report = ktransformers.inject(models.make_qwen3_moe(), "cpu-only", keep_float=False)
    with pytest.raises(UndoError, match="inject with keep_float=True to be able to go back"):
        report.undo()


def test_a_compiled_model_breaks_its_graph_at_the_kernel_and_computes_the_same() -> None:
    model = models.make_qwen3_moe()
    ktransformers.inject(model, [EXPERTS, HEAD])
    around = nn.Sequential(nn.Tanh(), model.lm_head, nn.Tanh())  # whole models take half a minute
    hidden, ids, weights = torch.randn(3, 64), torch.tensor([[0, 1]] * 3), torch.full((3, 2), 0.5)
    experts = model.get_submodule("model.layers.1.mlp.experts")
    torch._dynamo.reset()
    with torch.inference_mode():
        assert torch.equal(torch.compile(around, backend="eager")(hidden), around(hidden))
        compiled = torch.compile(lambda *inputs: 2 * experts(*inputs), backend="eager")
        assert torch.equal(compiled(hidden, ids, weights), 2 * experts(hidden, ids, weights))
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="runs in the CPU kernel, outside of torch"):
            torch.compile(around, backend="eager", fullgraph=True)(hidden)


class Slow(KTransformersExperts):
    """Waits while it loads, so that another thread comes in between."""

    loading = threading.Event()
    go_on = threading.Event()

    def load(self) -> None:
        self.loading.set()
        assert self.go_on.wait(60)
        super().load()


def test_two_threads_that_inject_one_model_do_not_mix() -> None:
    model = models.make_qwen3_moe()
    eager = _logits(model)
    slow = {"match": {"name": r"\.experts$"}, "replace": {"class": f"{__name__}.Slow"}}
    plans = [make_plan([slow], model), make_plan([EXPERTS], model)]
    reports: list[ktransformers.Report] = []
    first = threading.Thread(target=lambda: reports.append(apply_plan(plans[0], model)))
    first.start()
    assert Slow.loading.wait(60)
    with pytest.raises(InjectionError, match="is being replaced by another thread at this moment; wait for it"):
        apply_plan(plans[1], model)
    head = ktransformers.inject(model, [HEAD])  # another part of the model
    Slow.go_on.set()
    first.join(60)
    assert {type(module) for module in model.modules() if isinstance(module, KTransformersExperts)} == {Slow}
    with pytest.raises(InjectionError, match="plan was made for another model"):
        apply_plan(plans[1], model)
    head.undo()
    reports[0].undo()
    assert torch.equal(_logits(model), eager)


def test_what_is_no_model_is_refused_by_its_type() -> None:
    with pytest.raises(TypeError, match=r"inject takes a loaded model, a torch\.nn\.Module; this is a dict$"):
        ktransformers.inject({"model": 1}, [EXPERTS])  # type: ignore[arg-type]
    wrapped = ktransformers.KTransformer(models.make_qwen3_moe())
    with pytest.raises(TypeError, match=r"this is a KTransformer: give its \.model"):
        ktransformers.inject(wrapped, [EXPERTS])  # type: ignore[arg-type]
