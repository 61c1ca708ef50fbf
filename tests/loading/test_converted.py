"""A folder that the converter wrote stands in for packing the checkpoint's experts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_kernel.converter import convert
from ktransformers import KTransformer, KTransformersConfig
from ktransformers.errors import CheckpointError
from tests import models
from tests.checkpoints.folders import make_checkpoint

IDS = torch.arange(20).view(1, 20)
RULES: list[dict[str, Any]] = [
    {"match": {"name": r"\.experts$"}, "replace": {"class": "KTransformersExperts", "kwargs": {"backend": "AMXINT8"}}}
]


def _logits(model: KTransformer) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model.model(IDS).logits
    return logits


@pytest.mark.parametrize(
    "build", [models.make_qwen3_moe, models.make_mixtral, models.make_deepseek_v3, models.make_granite_moe]
)
def test_experts_come_from_the_folder_with_equal_bits(build: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", build)
    wanted = _logits(KTransformer.from_pretrained(checkpoint, RULES))
    convert(checkpoint, tmp_path / "packed", "AMXINT8")
    model = KTransformer.from_pretrained(checkpoint, RULES, weights_path=tmp_path / "packed")
    assert torch.equal(_logits(model), wanted)


def test_the_folder_alone_says_what_to_do(tmp_path: Path) -> None:
    convert(make_checkpoint(tmp_path / "checkpoint"), tmp_path / "packed", "AMXINT8")
    with pytest.raises(CheckpointError, match="with this folder as weights_path"):
        KTransformer.from_pretrained(tmp_path / "packed", RULES)


def test_another_format_than_the_rules_ask_for_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    convert(checkpoint, tmp_path / "packed", "AMXBF16")
    with pytest.raises(CheckpointError, match=r"format BF16 \(wanted: INT8\)"):
        KTransformer.from_pretrained(checkpoint, RULES, weights_path=tmp_path / "packed")


@pytest.mark.parametrize("other", [{"vocab_size": 300}, {"seed": 1}], ids=["of another size", "of the same size"])
def test_a_folder_of_another_checkpoint_is_refused(tmp_path: Path, other: dict[str, int]) -> None:
    convert(make_checkpoint(tmp_path / "one", **other), tmp_path / "packed", "AMXINT8")
    checkpoint = make_checkpoint(tmp_path / "two")
    with pytest.raises(CheckpointError, match="packed from other files"):
        KTransformer.from_pretrained(checkpoint, RULES, weights_path=tmp_path / "packed")


def test_a_layer_that_is_missing_is_named(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    convert(checkpoint, tmp_path / "packed", "AMXINT8")
    (tmp_path / "packed" / "model.layers.2.mlp.experts.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no packed experts for model\.layers\.2\.mlp\.experts"):
        KTransformer.from_pretrained(checkpoint, RULES, weights_path=tmp_path / "packed")


def test_a_folder_without_packed_experts_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="holds no packed experts"):
        KTransformer.from_pretrained(checkpoint, RULES, weights_path=shutil.copytree(checkpoint, tmp_path / "copy"))


def test_without_rules_nothing_would_take_them(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="without rules"):
        KTransformer.from_pretrained(checkpoint, weights_path=tmp_path / "packed")


def test_there_are_no_floats_to_keep(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no floats to keep"):
        KTransformersConfig(RULES, weights_path=tmp_path, keep_float=True)
