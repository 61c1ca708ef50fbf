"""A checkpoint that would leave parameters at random is an error that counts and names them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktransformers.checkpoints import read_headers, verify_complete
from ktransformers.errors import CheckpointError
from ktransformers.injection import build_meta_model
from tests import models
from tests.checkpoints.folders import make_checkpoint, rewrite


def _verify(folder: Path) -> None:
    files = read_headers(folder)
    assert files is not None
    verify_complete(files, build_meta_model(folder))


@pytest.mark.parametrize(
    "build",
    [
        models.make_qwen3_moe,
        models.make_qwen2_moe,
        models.make_deepseek_v3,
        models.make_mixtral,
        models.make_olmoe,
        models.make_granite_moe,
        models.make_gpt_oss,
        models.make_llama_dense,
    ],
)
def test_whole_checkpoints_pass_whatever_their_names_on_disk(build: Callable[..., Any], tmp_path: Path) -> None:
    _verify(make_checkpoint(tmp_path, build))


def test_tied_embeddings_are_not_missing(tmp_path: Path) -> None:
    _verify(make_checkpoint(tmp_path, tie_word_embeddings=True))


def test_experts_under_another_prefix_are_counted_as_missing(tmp_path: Path) -> None:
    rewrite(make_checkpoint(tmp_path), lambda name: name.replace(".mlp.experts.", ".mlp.specialists."))
    with pytest.raises(CheckpointError) as caught:
        _verify(tmp_path)
    assert "experts' tensors expected 4, found 0" in str(caught.value)
    assert "model.layers.1.mlp.experts.down_proj" in str(caught.value)


def test_the_first_five_of_many_missing_tensors_are_named(tmp_path: Path) -> None:
    rewrite(make_checkpoint(tmp_path), lambda name: None if "self_attn" in name else name)
    with pytest.raises(CheckpointError, match=r"other tensors expected 32, found 14\. Missing: .* and 13 more"):
        _verify(tmp_path)


@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
def test_one_lost_expert_is_noticed_though_its_layer_is_there(tmp_path: Path, projection: str) -> None:
    lost = f"model.layers.2.mlp.experts.3.{projection}.weight"
    rewrite(make_checkpoint(tmp_path), lambda name: None if name == lost else name)
    with pytest.raises(CheckpointError) as caught:
        _verify(tmp_path)
    assert f"model.layers.2.mlp.experts.*.{projection}.weight (7)" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_configuration_of_other_sizes_is_told_with_both_shapes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 259', '"vocab_size": 300'))
    with pytest.raises(CheckpointError, match=r"\(259, 64\) on disk and \(300, 64\) by the configuration"):
        _verify(tmp_path)
