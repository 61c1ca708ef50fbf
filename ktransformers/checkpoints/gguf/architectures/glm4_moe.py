"""`glm4moe`: GLM-4.5, GLM-4.5-Air and their successors of the same build."""

from __future__ import annotations

from typing import Any

from ktransformers.checkpoints.gguf.architectures.base import SIGMOID, Architecture, decoder_config, rope_parameters
from ktransformers.checkpoints.gguf.architectures.names import ATTENTION, DENSE, OUTSIDE
from ktransformers.checkpoints.gguf.facts import Facts

__all__ = ["GLM4_MOE"]


def _config(facts: Facts) -> dict[str, Any]:
    ahead = facts.get("nextn_predict_layers", 0)
    head = facts.need("attention.key_length")
    facts.only("expert_gating_func", SIGMOID)
    return decoder_config(
        facts,
        "glm4_moe",
        # The file counts the layers that predict further tokens; the decoder has none of them.
        num_hidden_layers=facts.need("block_count", least=1) - ahead,
        num_mtp_layers=ahead,
        intermediate_size=facts.need("feed_forward_length"),
        moe_intermediate_size=facts.need("expert_feed_forward_length"),
        n_routed_experts=facts.need("expert_count"),
        n_shared_experts=facts.need("expert_shared_count"),
        num_experts_per_tok=facts.need("expert_used_count"),
        first_k_dense_replace=facts.get("leading_dense_block_count", 0),
        # Absent from early files; true in all models of this build (config.json).
        norm_topk_prob=facts.get("expert_weights_norm", True),
        routed_scaling_factor=facts.need("expert_weights_scale"),
        # Absent from early files; 1 in all models of this build (config.json).
        n_group=facts.get("expert_group_count", 1),
        topk_group=facts.get("expert_group_used_count", 1),
        attention_bias=facts.has("blk.0.attn_q.bias"),
        use_qk_norm=facts.has("blk.0.attn_q_norm.weight"),
        rope_parameters=rope_parameters(facts, partial_rotary_factor=facts.get("rope.dimension_count", head) / head),
    )


GLM4_MOE = Architecture(
    "glm4moe",
    _config,
    {
        **OUTSIDE,
        **ATTENTION,
        **DENSE,
        "post_attention_layernorm": "post_attention_norm",
        "mlp.gate": "ffn_gate_inp",
        "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
        "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
        "mlp.shared_experts.up_proj": "ffn_up_shexp",
        "mlp.shared_experts.down_proj": "ffn_down_shexp",
    },
)
