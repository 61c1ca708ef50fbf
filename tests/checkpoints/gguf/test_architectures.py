"""Models of every architecture, written as llama.cpp's converter writes them, come back as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.checkpoints.gguf.loading import load, logits
from tests.checkpoints.gguf.writer import write_gguf
from tests.models import (
    make_deepseek_v2,
    make_deepseek_v3,
    make_glm4_moe,
    make_gpt_oss,
    make_granite_moe,
    make_granite_moe_shared,
    make_llama_dense,
    make_mixtral,
    make_olmoe,
    make_qwen2_dense,
    make_qwen2_moe,
    make_qwen3_dense,
    make_qwen3_moe,
)

Maker = Callable[..., PreTrainedModel]

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": make_llama_dense,
    "llama with linear scaling": lambda: make_llama_dense(
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "llama, embeddings tied": lambda: make_llama_dense(tie_word_embeddings=True),
    "qwen2": make_qwen2_dense,
    "qwen3": make_qwen3_dense,
    "mixtral": make_mixtral,
    "qwen2_moe": make_qwen2_moe,
    "qwen3_moe": lambda: make_qwen3_moe(mlp_only_layers=[]),
    "olmoe": make_olmoe,
    "gpt_oss": make_gpt_oss,
    "gpt_oss with yarn": lambda: make_gpt_oss(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        }
    ),
    "glm4_moe": make_glm4_moe,
    "granitemoe": make_granite_moe,
    "granitemoeshared": make_granite_moe_shared,
    "deepseek_v2": make_deepseek_v2,
    "deepseek_v2, full query matrix, greedy": lambda: make_deepseek_v2(q_lora_rank=None, topk_method="greedy"),
    "deepseek_v3": make_deepseek_v3,
    "deepseek_v3 with yarn": lambda: make_deepseek_v3(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        }
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_weights_and_configuration_come_back_exactly(kind: str, tmp_path: Path) -> None:
    original = MODELS[kind]()
    write_gguf(original, tmp_path / "model.gguf")
    loaded = load(tmp_path / "model.gguf")
    assert type(loaded) is type(original)
    theirs = loaded.state_dict()
    for name, tensor in original.state_dict().items():
        assert torch.equal(theirs[name], tensor), name
    assert torch.equal(logits(loaded), logits(original))
