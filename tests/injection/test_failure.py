"""All or nothing: whatever ends an injection half-way, the model is as it was or says what it lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import kt_kernel
from ktransformers.errors import FreedModuleError, InjectionError, RuleMatchError
from ktransformers.injection import FreedModule, apply_plan, is_injected, make_plan
from tests.injection.operators import Packing
from tests.injection.rules_of import EXPERTS, PACKING, make_rule
from tests.models import make_mixtral, make_qwen3_moe

_IDS = torch.arange(12)[None]
_LAYER = "model.layers.{}.mlp.experts"


def _fail_at(monkeypatch: pytest.MonkeyPatch, layer: int, error: BaseException) -> None:
    monkeypatch.setattr(Packing, "fail_at", {_LAYER.format(layer): error})


def _inject(model: nn.Module, to: str = PACKING, **options: Any) -> None:
    apply_plan(make_plan([make_rule(EXPERTS, to)], model), model, **options)


def _state(model: nn.Module) -> list[int]:
    return [*map(id, model.modules()), *map(id, model.parameters()), *map(id, model.buffers())]


@pytest.mark.parametrize("error", [RuntimeError("no memory left"), MemoryError(), KeyboardInterrupt(), SystemExit(3)])
def test_a_failure_in_the_second_layer_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    model = make_mixtral()
    before, logits = _state(model), model(_IDS).logits
    _fail_at(monkeypatch, 1, error)
    expected = InjectionError if isinstance(error, Exception) else type(error)
    with pytest.raises(expected) as caught:
        _inject(model)
    assert _state(model) == before
    assert torch.equal(model(_IDS).logits, logits)
    told = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert told.endswith("The model is as it was")


def test_the_error_names_rule_operator_module_and_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_at(monkeypatch, 1, RuntimeError("no memory left"))
    with pytest.raises(InjectionError) as caught:
        _inject(make_mixtral())
    assert str(caught.value).startswith(
        "<python>: rule 1: loading Packing for model.layers.1.mlp.experts failed: no memory left. "
    )


def test_a_model_that_failed_once_can_be_injected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_mixtral()
    _fail_at(monkeypatch, 2, RuntimeError("busy"))
    with pytest.raises(InjectionError):
        _inject(model)
    monkeypatch.setattr(Packing, "fail_at", {})
    _inject(model)
    assert is_injected(model.model.layers[2].mlp.experts)


@pytest.mark.parametrize("error", [RuntimeError("no memory left"), KeyboardInterrupt()])
def test_without_floats_the_freed_layers_refuse_and_the_others_are_whole(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    model = make_mixtral()
    untouched = model.model.layers[1].mlp.experts
    _fail_at(monkeypatch, 1, error)
    with pytest.raises((InjectionError, KeyboardInterrupt)) as caught:
        _inject(model, keep_float=False)
    told = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "float weights of model.layers.0.mlp.experts had been freed already" in told
    assert "load the model again" in told
    assert "keep_float=True" in told
    assert isinstance(model.model.layers[0].mlp.experts, FreedModule)
    assert model.model.layers[1].mlp.experts is untouched
    assert not untouched.down_proj.is_meta
    with pytest.raises(
        FreedModuleError, match=r"model\.layers\.0\.mlp\.experts has no weights: .* load the model again"
    ):
        model(_IDS)


def test_a_model_that_lost_weights_is_not_injected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_mixtral()
    _fail_at(monkeypatch, 1, RuntimeError("no"))
    with pytest.raises(InjectionError):
        _inject(model, keep_float=False)
    with pytest.raises(RuleMatchError, match=r"model\.layers\.0\.mlp\.experts has no weights: .* load the model again"):
        make_plan([make_rule(r"\.experts$", PACKING)], model)


def test_an_operator_that_cannot_be_built_is_named_with_its_rule() -> None:
    model = make_qwen3_moe()
    before = _state(model)
    with pytest.raises(InjectionError) as caught:
        _inject(model, f"{__name__}.Unbuildable")
    assert _state(model) == before
    assert str(caught.value) == (
        "<python>: rule 1: Unbuildable for model.layers.1.mlp.experts cannot be built: only on Tuesdays. The model is "
        "as it was"
    )


def test_weights_that_the_kernel_refuses_leave_the_model_as_it_was() -> None:
    model = make_qwen3_moe()
    with torch.no_grad():
        model.model.layers[2].mlp.experts.down_proj[3, 5, 7] = float("nan")
    before = _state(model)
    with pytest.raises(InjectionError) as caught:
        _inject(model, "KTransformersExperts")
    assert "loading KTransformersExperts for model.layers.2.mlp.experts failed: " in str(caught.value)
    assert str(caught.value).endswith("The model is as it was")
    assert isinstance(caught.value.__cause__, InjectionError)
    assert isinstance(caught.value.__cause__.__cause__, kt_kernel.KernelError)
    assert _state(model) == before


def test_wrong_arguments_that_only_construction_can_tell() -> None:
    model = make_qwen3_moe()
    plan = make_plan([make_rule(EXPERTS, f"{__name__}.TakesAll", bits=4)], model)
    with pytest.raises(InjectionError, match=r"rule 1: TakesAll .* unexpected keyword argument 'bits'"):
        apply_plan(plan, model)


def test_a_failure_while_swapping_takes_back_what_was_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_qwen3_moe()
    before = _state(model)
    hook = model.model.layers[1].mlp.experts.register_forward_hook(lambda *_: None)
    block = type(model.model.layers[2].mlp)

    def _interrupted(module: nn.Module, name: str, value: nn.Module) -> None:
        if module is model.model.layers[2].mlp and isinstance(value, Packing):
            raise KeyboardInterrupt
        nn.Module.__setattr__(module, name, value)

    monkeypatch.setattr(block, "__setattr__", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        _inject(model)
    assert _state(model) == before
    assert len(model.model.layers[1].mlp.experts._forward_hooks) == 1
    hook.remove()
    assert len(model.model.layers[1].mlp.experts._forward_hooks) == 0


def test_an_operator_that_cannot_describe_itself_does_not_leave_an_unreported_model() -> None:
    model = make_qwen3_moe()
    before = _state(model)
    with pytest.raises(InjectionError, match="no words"):
        _inject(model, f"{__name__}.Speechless")
    assert _state(model) == before


class Unbuildable(Packing):
    def __init__(self, **_: Any) -> None:
        raise ValueError("only on Tuesdays")


class TakesAll(Packing):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)


class Speechless(Packing):
    def describe(self) -> dict[str, str]:
        raise RuntimeError("no words")
