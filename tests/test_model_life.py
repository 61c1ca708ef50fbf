"""An injected model in the hands of ordinary programs: saved, copied, listed, moved."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import ktransformers
from ktransformers.errors import CheckpointError
from tests import models

RULES: list[dict[str, Any]] = [
    {"match": {"name": r"\.experts$"}, "replace": {"class": "KTransformersExperts", "kwargs": {"backend": "INT8"}}}
]
IDS = torch.arange(20).view(1, 20)


def _make_injected(*, keep_float: bool) -> tuple[PreTrainedModel, ktransformers.Report]:
    model = models.make_qwen3_moe()
    return model, ktransformers.inject(model, RULES, keep_float=keep_float)


def _logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(IDS).logits
    return logits


@pytest.mark.parametrize("keep_float", [True, False])
def test_nothing_that_lists_or_converts_modules_crashes(keep_float: bool) -> None:
    model, _ = _make_injected(keep_float=keep_float)
    wanted = _logits(model)
    model.state_dict()
    assert dict(model.named_parameters())
    assert torch.equal(_logits(model.eval().to("cpu").float()), wanted)
    assert torch.equal(_logits(copy.deepcopy(model)), wanted)


def test_with_floats_kept_saving_writes_the_original_checkpoint(tmp_path: Path) -> None:
    original = models.make_qwen3_moe()
    model, _ = _make_injected(keep_float=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    wanted = original.state_dict()
    assert set(again) == set(wanted)
    assert all(torch.equal(again[name], wanted[name]) for name in wanted)


def test_with_floats_freed_saving_is_refused_before_a_file_is_written(tmp_path: Path) -> None:
    model, _ = _make_injected(keep_float=False)
    with pytest.raises(CheckpointError, match=r"not supported after this injection.*2 modules.*keep_float=True"):
        model.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError):
        copy.deepcopy(model).save_pretrained(tmp_path)


def test_with_floats_freed_neither_a_part_nor_the_whole_around_it_is_saved(tmp_path: Path) -> None:
    whole, _ = _make_injected(keep_float=False)
    around = models.make_qwen3_moe()
    ktransformers.inject(around.model, RULES, keep_float=False)
    for model in (whole.model, around):
        with pytest.raises(CheckpointError, match="not supported after this injection"):
            model.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_after_undo_a_model_pickles_and_goes_when_nobody_holds_it() -> None:
    model, report = _make_injected(keep_float=True)
    report.undo()
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(_logits(twin), _logits(model))
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model, report
        assert gone() is None
    finally:
        gc.enable()


def test_after_undo_saving_works_as_ever(tmp_path: Path) -> None:
    model, report = _make_injected(keep_float=True)
    report.undo()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()


def test_a_call_that_wants_gradients_says_so() -> None:
    model, _ = _make_injected(keep_float=True)
    model.train()
    with pytest.raises(RuntimeError, match="computes no gradients"):
        model(IDS)
    with torch.no_grad():
        assert model(IDS).logits.isfinite().all()


def test_freed_floats_are_really_gone() -> None:
    model, _ = _make_injected(keep_float=False)
    experts: Any = model.get_submodule("model.layers.1.mlp.experts")
    assert all(parameter.is_meta for parameter in experts.orig_module.parameters())
