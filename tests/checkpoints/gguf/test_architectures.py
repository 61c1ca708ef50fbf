"""Models of every architecture, written as llama.cpp's converter writes them, come back as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ktransformers import KTransformer
from tests.checkpoints.gguf.loading import load, logits
from tests.checkpoints.gguf.writer import Wish, write_gguf
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
    make_starcoder2,
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
    "gpt_oss with yarn of its own": lambda: make_gpt_oss(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 16.0,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
            "attention_factor": 1.5,
            "truncate": False,
            "original_max_position_embeddings": 32,
        }
    ),
    "glm4_moe": make_glm4_moe,
    "granitemoe": make_granite_moe,
    "granitemoeshared": make_granite_moe_shared,
    "deepseek_v2": make_deepseek_v2,
    "deepseek_v2, full query matrix, greedy": lambda: make_deepseek_v2(
        q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1
    ),
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


def test_llama_3_scaling_stored_as_a_tensor_of_factors(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    original = make_llama_dense(rope_parameters=rope)
    plain = make_llama_dense()
    factors = plain.model.rotary_emb.inv_freq / original.model.rotary_emb.inv_freq
    assert factors.max() > 7
    write_gguf(original, tmp_path / "model.gguf", Wish(add={"rope_freqs.weight": factors.numpy()}))
    loaded = load(tmp_path / "model.gguf")
    torch.testing.assert_close(logits(loaded), logits(original), rtol=1e-4, atol=1e-4)
    assert (logits(plain) - logits(original)).abs().max() > 0.1


def test_values_that_files_lack_are_those_of_the_models_not_defaults(tmp_path: Path) -> None:
    write_gguf(make_qwen3_moe(mlp_only_layers=[]), tmp_path / "qwen3.gguf")
    write_gguf(make_qwen2_moe(), tmp_path / "qwen2.gguf")
    assert load(tmp_path / "qwen3.gguf").config.norm_topk_prob is True
    assert load(tmp_path / "qwen2.gguf").config.norm_topk_prob is False
    write_gguf(make_qwen2_moe(), tmp_path / "said.gguf", Wish(metadata={"expert_weights_norm": True}))
    assert load(tmp_path / "said.gguf").config.norm_topk_prob is True


@pytest.mark.parametrize("experts", [64, 160, 256, 384])
def test_grouping_of_deepseek_models_from_before_files_said_it(experts: int, tmp_path: Path) -> None:
    lacking = {"expert_group_count": None, "expert_group_used_count": None}
    sizes = {"n_routed_experts": experts, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    make = make_deepseek_v2 if experts == 160 else make_deepseek_v3
    write_gguf(make(**sizes), tmp_path / "model.gguf", Wish(metadata=lacking))
    config = load(tmp_path / "model.gguf").config
    assert (config.n_group, config.topk_group) == {64: (1, 1), 160: (8, 3), 256: (8, 4), 384: (1, 1)}[experts]


def test_keys_and_values_in_one_matrix_as_older_files_have_them(tmp_path: Path) -> None:
    original = make_deepseek_v3(num_hidden_layers=2)
    joined = {
        f"blk.{n}.attn_kv_b.weight": layer.self_attn.kv_b_proj.weight.detach().numpy()
        for n, layer in enumerate(original.model.layers)
    }
    apart = tuple(f"blk.{n}.attn_{part}_b.weight" for n in range(2) for part in "kv")
    sizes = {"attention.key_length": 24, "attention.value_length": 16, "attention.head_count_kv": 4}
    metadata = {**sizes, "attention.key_length_mla": None, "attention.value_length_mla": None}
    write_gguf(original, tmp_path / "model.gguf", Wish(add=joined, drop=apart, metadata=metadata))
    assert torch.equal(logits(load(tmp_path / "model.gguf")), logits(original))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    original = make_glm4_moe()
    ahead = {"blk.3.attn_norm.weight": np.ones(64, np.float32), "blk.3.nextn.eh_proj.weight": np.ones((64, 128), "f4")}
    metadata = {"block_count": 4, "nextn_predict_layers": 1}
    write_gguf(original, tmp_path / "model.gguf", Wish(add=ahead, metadata=metadata))
    loaded = load(tmp_path / "model.gguf")
    assert loaded.config.num_hidden_layers == 3
    assert torch.equal(logits(loaded), logits(original))


def test_an_architecture_that_only_transformers_knows_is_read_by_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files only with it")
    original = make_starcoder2()
    write_gguf(original, tmp_path / "model.gguf")
    loaded = KTransformer.from_pretrained(tmp_path / "model.gguf", dtype=torch.float32)
    assert torch.equal(logits(loaded.model), logits(original))
    assert loaded.generate("ab", max_new_tokens=3) is not None
