"""A checkpoint that cannot become a model, met by transformers' own `from_pretrained`: an error, and no model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ktransformers import KTransformersConfig
from ktransformers.checkpoints import parts
from ktransformers.errors import CheckpointError, InjectionError
from tests.checkpoints.folders import make_checkpoint

UP = "model.layers.2.mlp.experts.5.up_proj.weight"


def _change(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _load(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=KTransformersConfig("auto"))


def _poison(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors[UP][3, 7].fill_(value)


@pytest.mark.parametrize("part_bytes", [1, parts.PART_BYTES])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_names_layer_expert_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, part_bytes: int
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", part_bytes)
    _change(make_checkpoint(tmp_path), _poison(value))
    with pytest.raises(InjectionError, match=r"model\.layers\.2\.mlp\.experts failed: .*expert 5.*up.*3") as caught:
        _load(tmp_path)
    assert "The model was not loaded" in str(caught.value)


def test_an_expert_that_is_missing_is_counted_and_named(tmp_path: Path) -> None:
    _change(make_checkpoint(tmp_path), lambda tensors: tensors.pop(UP))
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj cannot be made of .*up_proj\.weight \(7\)"):
        _load(tmp_path)


def test_a_projection_of_another_shape_is_named(tmp_path: Path) -> None:
    _change(make_checkpoint(tmp_path), lambda tensors: tensors.update({UP: torch.zeros(3, 5)}))
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.gate_up_proj"):
        _load(tmp_path)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(tmp_path) / "model.safetensors"
    from ktransformers.loading import quantizer

    load = quantizer.load_placed

    def shrink_first(*args: Any, **kwargs: Any) -> None:
        path.write_bytes(path.read_bytes()[:2000])
        load(*args, **kwargs)

    monkeypatch.setattr(quantizer, "load_placed", shrink_first)
    with pytest.raises((CheckpointError, InjectionError), match="cannot be read"):
        _load(tmp_path)
