"""`deepseek2`: DeepSeek V2, V3, R1 and what is built like them (Kimi K2, Moonlight)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ktransformers.checkpoints.gguf.architectures.base import (
    SIGMOID,
    SOFTMAX,
    Architecture,
    Made,
    decoder_config,
    rope_parameters,
)
from ktransformers.checkpoints.gguf.architectures.names import DENSE, OUTSIDE
from ktransformers.checkpoints.gguf.facts import Facts

__all__ = ["DEEPSEEK2"]

# Files of before 2026 do not say how experts are grouped: (n_group, topk_group) by the number of experts, from the
# config.json of DeepSeek-V2 (160), V2-Lite and Moonlight (64), V3 and R1 (256), Kimi K2 (384).
_GROUPS = {64: (1, 1), 160: (8, 3), 256: (8, 4), 384: (1, 1)}


def _config(facts: Facts) -> dict[str, Any]:
    experts = facts.need("expert_count")
    rotated = facts.need("rope.dimension_count")
    # Files with separate key and value matrices state the compressed sizes as key_length and value_length.
    key = facts.get("attention.key_length_mla", facts.need("attention.key_length"))
    # Absent from files of V2, written before there was another.
    gating = facts.get("expert_gating_func", SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID):
        facts.problems.append(f"expert_gating_func {gating} is not read; functions: 1 (softmax), 2 (sigmoid)")
    ahead = facts.get("nextn_predict_layers", 0)
    heads = facts.need("attention.head_count", least=1)
    config = decoder_config(
        facts,
        "deepseek_v3" if gating == SIGMOID else "deepseek_v2",
        num_hidden_layers=facts.need("block_count", least=1) - ahead,
        num_key_value_heads=heads,  # the file says 1 where keys and values are stored compressed
        head_dim=rotated,
        intermediate_size=facts.need("feed_forward_length"),
        moe_intermediate_size=facts.need("expert_feed_forward_length"),
        n_routed_experts=experts,
        n_shared_experts=facts.need("expert_shared_count"),
        num_experts_per_tok=facts.need("expert_used_count"),
        first_k_dense_replace=facts.get("leading_dense_block_count", 0),
        q_lora_rank=facts.get("attention.q_lora_rank"),
        kv_lora_rank=facts.need("attention.kv_lora_rank"),
        qk_rope_head_dim=rotated,
        qk_nope_head_dim=key - rotated,
        v_head_dim=facts.get("attention.value_length_mla", facts.need("attention.value_length")),
        # Absent where it is false (V2).
        norm_topk_prob=facts.get("expert_weights_norm", False),
        routed_scaling_factor=facts.get("expert_weights_scale", 1.0),
        rope_parameters=_rope(facts),
        **_grouping(facts, experts, gating),
    )
    return {**config, "num_mtp_layers": ahead} if gating == SIGMOID else config


def _grouping(facts: Facts, experts: int, gating: int) -> dict[str, Any]:
    groups = facts.get("expert_group_count"), facts.get("expert_group_used_count")
    if None in groups:
        if experts not in _GROUPS:
            facts.problems.append(
                f"the metadata lack deepseek2.expert_group_count, and no model of {experts} experts is known: convert "
                "the model with a newer llama.cpp"
            )
            return {}
        groups = _GROUPS[experts]
    method = "greedy" if groups[0] == 1 else "group_limited_greedy"
    named = {"n_group": groups[0], "topk_group": groups[1]}
    return named if gating == SIGMOID else {**named, "topk_method": method}


def _rope(facts: Facts) -> dict[str, Any]:
    rope = rope_parameters(facts)
    if rope["rope_type"] == "yarn":
        # The converter stores a tenth of mscale_all_dim, to which mscale is equal in every model (V2: 0.707, V3: 1).
        scale = round(facts.get("rope.scaling.yarn_log_multiplier", 0.0) * 10, 6)
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    return rope


def _keys_and_values(tensors: Sequence[torch.Tensor], _: Any) -> torch.Tensor:
    """attn_k_b (heads, rank, keys), attn_v_b (heads, values, rank) → kv_b_proj (heads·(keys + values), rank)."""
    keys, values = tensors
    return torch.cat([keys.transpose(1, 2), values], dim=1).reshape(-1, values.shape[-1])


DEEPSEEK2 = Architecture(
    "deepseek2",
    _config,
    {
        **OUTSIDE,
        **DENSE,
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj.weight": (
            "attn_kv_b.weight",
            Made(("attn_k_b.weight", "attn_v_b.weight"), _keys_and_values),
        ),
        "self_attn.o_proj": "attn_output",
        "mlp.gate": "ffn_gate_inp",
        "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
        "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
        "mlp.shared_experts.up_proj": "ffn_up_shexp",
        "mlp.shared_experts.down_proj": "ffn_down_shexp",
    },
)
