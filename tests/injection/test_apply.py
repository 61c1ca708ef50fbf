"""Carrying a plan out: how operators are built, what they get, what stays untouched."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from ktransformers.errors import InjectionError
from ktransformers.injection import Report, apply_plan, build_meta_model, is_injected, make_plan
from tests.injection.operators import Packing, PassThrough
from tests.injection.rules_of import EXPERTS, PACKING, PASS_THROUGH, make_rule
from tests.models import make_deepseek_v3, make_mixtral, make_qwen3_moe, moe_layers

_IDS = torch.arange(12)[None]


def _inject(model: nn.Module, *rules: dict[str, Any], **options: Any) -> Report:
    return apply_plan(make_plan(list(rules), model), model, **options)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(_IDS).logits


@pytest.mark.parametrize("to", [PASS_THROUGH, PACKING])
@pytest.mark.parametrize("keep_float", [True, False])
def test_an_injected_model_computes_what_it_did(to: str, keep_float: bool) -> None:
    model = make_qwen3_moe()
    before = _logits(model)
    report = _inject(model, make_rule(EXPERTS, to), keep_float=keep_float)
    assert all(is_injected(model.get_submodule(name)) for name in moe_layers(model))
    assert len(report.replacements) == 2
    assert torch.equal(_logits(model), before)


def test_an_operator_is_built_as_third_party_classes_expect() -> None:
    model, loader = make_qwen3_moe(), object()
    original = model.model.layers[1].mlp.experts
    _inject(model, make_rule(r"layers\.1\..*experts$", scale=0.5), gguf_loader=loader)
    operator = model.model.layers[1].mlp.experts
    assert isinstance(operator, PassThrough)
    assert (operator.key, operator.scale) == ("model.layers.1.mlp.experts", 0.5)
    assert operator.gguf_loader is loader
    assert operator.config is model.config
    assert operator.orig_module is original


def test_each_operator_gets_arguments_of_its_own() -> None:
    model = make_qwen3_moe()
    _inject(model, make_rule(EXPERTS, f"{__name__}.Greedy", devices=["cpu"]))
    assert model.model.layers[2].mlp.experts.devices == ["cpu"]


def test_operators_load_in_the_order_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Packing, "loaded", [])
    model = make_mixtral()
    _inject(model, make_rule(r"\.2\..*experts$", PACKING), make_rule(EXPERTS, PACKING))
    assert Packing.loaded == [f"model.layers.{i}.mlp.experts" for i in range(3)]


def test_a_part_of_the_model_with_its_own_configuration_hands_that_one_on() -> None:
    model = make_qwen3_moe()
    text_config = object()
    model.model.config = text_config
    _inject(model, make_rule(r"layers\.1\..*experts$"))
    assert model.model.layers[1].mlp.experts.config is text_config


def test_a_block_and_its_experts_can_both_be_replaced() -> None:
    model = make_qwen3_moe()
    before = _logits(model)
    _inject(model, make_rule(r"layers\.1\.mlp$"), make_rule(r"layers\.1\.mlp\.experts$", PACKING))
    block = model.model.layers[1].mlp
    assert isinstance(block, PassThrough)
    assert isinstance(block.orig_module.experts, Packing)
    assert torch.equal(_logits(model), before)


def test_one_module_at_two_places_becomes_one_operator() -> None:
    model = make_qwen3_moe()
    model.model.layers[2].mlp.experts = model.model.layers[1].mlp.experts
    report = _inject(model, make_rule(EXPERTS, PACKING))
    assert model.model.layers[1].mlp.experts is model.model.layers[2].mlp.experts
    assert isinstance(model.model.layers[1].mlp.experts, Packing)
    assert [r.name for r in report.replacements] == ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts"]
    report.undo()
    assert type(model.model.layers[2].mlp.experts).__name__ == "Qwen3MoeExperts"


def test_everything_else_in_the_model_is_the_same_object() -> None:
    model = make_deepseek_v3()
    before = {
        name: tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()] if ".experts." not in name
    }
    _inject(model, make_rule(EXPERTS, PACKING), keep_float=False)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(after[name] is tensor for name, tensor in before.items())
    router = model.model.layers[1].mlp.gate
    assert (router.weight.dtype, router.e_score_correction_bias.dtype) == (torch.float32, torch.float32)


def test_float_weights_are_freed_as_soon_as_they_are_packed() -> None:
    model = make_qwen3_moe()
    originals = {name: model.get_submodule(name) for name in moe_layers(model)}
    alive = {name: weakref.ref(original.gate_up_proj) for name, original in originals.items()}
    _inject(model, make_rule(EXPERTS, f"{__name__}.Watching"), keep_float=False)
    gc.collect()
    assert all(reference() is None for reference in alive.values())
    assert all(original.gate_up_proj.is_meta for original in originals.values())
    first, second = (model.get_submodule(name) for name in originals)
    assert (first.freed_before, second.freed_before) == ([False, False], [True, False])


def test_float_weights_stay_for_operators_that_compute_with_them() -> None:
    model = make_qwen3_moe()
    rules = [make_rule(r"layers\.1\..*experts$"), make_rule(EXPERTS, f"{__name__}.Needing")]
    report = _inject(model, *rules, keep_float=False)
    assert report.floats_kept
    report.undo()


def test_a_block_that_is_packed_waits_for_its_experts_before_their_weights_go() -> None:
    model = make_qwen3_moe()
    before = _logits(model)
    rules = [make_rule(r"layers\.1\.mlp$", f"{__name__}.PackedBlock"), make_rule(EXPERTS, PACKING)]
    _inject(model, *rules, keep_float=False)
    block = model.model.layers[1].mlp
    assert block.orig_module.gate.weight.is_meta
    assert not block.orig_module.experts.packed["down_proj"].is_meta
    assert _logits(model).shape == before.shape


def test_weights_on_the_meta_device_can_be_planned_for_but_not_packed() -> None:
    meta = build_meta_model(make_qwen3_moe().config)
    plan = make_plan([make_rule(EXPERTS, PACKING)], meta)
    with pytest.raises(InjectionError, match=r"N = 1–2 are not in memory: .*gate_up_proj is on the meta device"):
        apply_plan(plan, meta)
    assert not any(is_injected(module) for module in meta.modules())


def test_a_plan_made_on_the_meta_device_is_carried_out_on_the_real_model() -> None:
    model = make_qwen3_moe()
    plan = make_plan([make_rule(EXPERTS, PACKING)], build_meta_model(model.config))
    assert len(apply_plan(plan, model).replacements) == 2


def test_a_plan_for_another_model_is_refused() -> None:
    plan = make_plan([make_rule(EXPERTS, PACKING)], make_qwen3_moe())
    for other in (make_mixtral(), make_qwen3_moe(num_hidden_layers=2)):
        with pytest.raises(InjectionError, match="the plan was made for another model"):
            apply_plan(plan, other)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("to", [PASS_THROUGH, PACKING])
def test_an_operator_takes_over_the_mode_of_what_it_replaces(to: str, training: bool) -> None:
    model = make_qwen3_moe().train(training)
    _inject(model, make_rule(EXPERTS, to))
    assert all(module.training is training for module in model.modules())


def test_hooks_on_experts_go_along_and_come_back() -> None:
    model, seen = make_qwen3_moe(), []
    original = model.model.layers[1].mlp.experts
    first = original.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    second = original.register_forward_pre_hook(lambda *_: seen.append("before"))
    report = _inject(model, make_rule(EXPERTS))
    _logits(model)
    assert seen == ["before", "PassThrough"]
    second.remove()
    report.undo()
    _logits(model)
    assert seen == ["before", "PassThrough", "Qwen3MoeExperts"]
    first.remove()
    _logits(model)
    assert len(seen) == 3


def test_generation_runs_through_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = make_qwen3_moe(), []
    expected = model.generate(_IDS, max_new_tokens=4, do_sample=False, eos_token_id=None)
    _inject(model, make_rule(EXPERTS, PACKING))
    forward = Packing.forward
    monkeypatch.setattr(Packing, "forward", lambda self, *args: calls.append(len(args[0])) or forward(self, *args))
    assert torch.equal(model.generate(_IDS, max_new_tokens=4, do_sample=False, eos_token_id=None), expected)
    assert calls == [12, 12, *[1] * 6]  # two layers: the prompt, then three steps


class Greedy(PassThrough):
    """Changes what it was given."""

    def __init__(self, key: str, gguf_loader: object, config: Any, orig_module: nn.Module, devices: list[str]) -> None:
        super().__init__(key=key, gguf_loader=gguf_loader, config=config, orig_module=orig_module)
        self.devices = list(devices)
        devices.append("cuda")


class Watching(Packing):
    """Notes in `load` which of the model's originals have lost their weights by then."""

    originals: list[nn.Module] = []  # noqa: RUF012

    def __init__(self, key: str, gguf_loader: object, config: Any, orig_module: nn.Module) -> None:
        super().__init__(key, gguf_loader, config, orig_module)
        self.originals.append(orig_module)

    def load(self) -> None:
        super().load()
        self.freed_before = [original.down_proj.is_meta for original in self.originals]


class Needing(Packing):
    needs_original = True


class PackedBlock(Packing):
    """Stands for a whole block, and lets go of its router."""

    @classmethod
    def check(cls, **_: Any) -> list[str]:
        return []

    def load(self) -> None:
        self.router = self.orig_module.gate.weight.detach().clone()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(self.orig_module, {"gate.weight": self.router}, (hidden,))
