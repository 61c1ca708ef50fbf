"""Configurations of a few kilobytes: every size that families' configurations know, cut down."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tools.families.scan import ExpertsClass, model_classes

__all__ = ["NotBuiltError", "tiny_config", "tiny_model"]

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "embed_dim": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "moe_intermediate_size": 48,
    "moe_hidden_size": 64,
    "expert_ffn_hidden_size": 48,
    "ffn_hidden_size": 96,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_routed_experts": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size_per_layer_input": 128,
    "unpadded_vocab_size": 128,
    # Layers of a state space or of linear attention.
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "ssm_state_size": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    # Other modalities' encoders, which a text never enters.
    "depth": 1,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "out_hidden_size": 64,
    "projector_hidden_size": 64,
    "position_embedding_size": 64,
    "deepstack_visual_indexes": [0],
}


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# What a family's own checks or defaults ask for.
_BY_FAMILY: dict[str, dict[str, Any]] = {
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {"num_key_value_heads": 4, "adapter_input_size": 64},
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse"], "n_shared_experts": 1},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [48, 32],
        "text_config": {"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}},
    },
    "diffusion_gemma": {"top_k_experts": 2},
    "flint": {"mlp_only_layers": [0]},
    "gemma4": {"enable_moe_block": True, "top_k_experts": 2},
    "glm4v_moe": {
        "text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}
    },
    "glm5_next": {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "mlp_layer_types": ["dense", "sparse"]},
    "hy_v4_vl": {"qk_rope_head_dim": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "step3p7": {"mlp_layer_types": ["dense", "sparse"], "sliding_window": 16},
    "muse_spark": {"audio_config": {"num_hidden_layers": 4, "hidden_sizes": [64, 64, 64, 64]}},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(config_class: type[PreTrainedConfig], family: str, role: str = "") -> PreTrainedConfig:
    """An instance with the sizes above wherever the class has the field, sub-configurations included.

    `role`: the name under which another configuration holds it, such as "text_config".
    """
    known = {field.name for field in dataclasses.fields(config_class)}
    asked = _BY_FAMILY.get(family, {})
    sizes = SIZES | asked | asked.get(role, {})
    if "kv_lora_rank" in known:
        sizes |= {"num_key_value_heads": sizes["num_attention_heads"]}  # latent attention has no groups of heads
    given = {name: value for name, value in sizes.items() if name in known}
    for name, sub in config_class.sub_configs.items():
        if not hasattr(sub, "sub_configs"):  # AutoConfig: whatever the default is
            sub = type(getattr(config_class(), name))
        if hasattr(sub, "sub_configs"):
            given[name] = tiny_config(sub, family, name)
    return config_class(**given)


class NotBuiltError(Exception):
    """No model class of the family can be built small; the text says what each one raised."""


def tiny_model(experts: ExpertsClass) -> PreTrainedModel:
    """The first of the family's model classes that holds the experts. Under `torch.device("meta")` it costs nothing."""
    problems = []
    for model_class in model_classes(experts):
        try:
            config = tiny_config(model_class.config_class, experts.family)
            config.dtype = torch.float32
            model: PreTrainedModel = model_class(config).eval()
        except Exception as error:  # whatever a family's constructor does not survive, the next one may
            problems.append(f"{model_class.__name__}: {type(error).__name__}: {error}")
            continue
        if paths_of(model, experts):
            return model
        problems.append(f"{model_class.__name__} holds none")
    raise NotBuiltError(f"{experts.name}: {'; '.join(problems)}")


def paths_of(model: PreTrainedModel, experts: ExpertsClass) -> list[str]:
    """Dotted names of the experts modules."""
    return [name for name, module in model.named_modules() if type(module) is experts.load()]
