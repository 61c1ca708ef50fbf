"""A checkpoint that would leave parameters at random is an error that counts and names them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

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


def _retype(folder: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: t for old, tensor in load_file(path).items() for name, t in change(old, tensor).items()}
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("build", [models.make_qwen3_moe, models.make_mixtral])
def test_scales_of_experts_that_the_configuration_does_not_mention(build: Callable[..., Any], tmp_path: Path) -> None:
    def with_scale(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: tensor, **({f"{name}_scale_inv": torch.ones(1)} if ".experts." in name else {})}

    _retype(make_checkpoint(tmp_path, build), with_scale)
    with pytest.raises(CheckpointError, match=r"holds \d+ experts' tensors that .*: (\S+_scale_inv,? ){5}and \d+ more"):
        _verify(tmp_path)


def test_a_layer_of_experts_more_than_the_configuration_has(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"holds 24 experts' tensors that .*model\.layers\.2\.mlp\.experts\.0\."):
        _verify(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    _verify(tmp_path)


@pytest.mark.parametrize(("dtype", "spelt"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_quantised_experts_without_a_quantisation_config(tmp_path: Path, dtype: torch.dtype, spelt: str) -> None:
    _retype(make_checkpoint(tmp_path), lambda n, t: {n: t.to(dtype) if ".experts." in n else t})
    with pytest.raises(CheckpointError, match=rf"48 experts' tensors as {spelt}, and .*no quantization_config"):
        _verify(tmp_path)
