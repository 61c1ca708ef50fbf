"""`granitemoe`: Granite 3 mixtures, with or without a shared expert."""

from __future__ import annotations

from typing import Any

from ktransformers.checkpoints.gguf.architectures.base import Architecture, decoder_config, softmax_router
from ktransformers.checkpoints.gguf.architectures.names import ATTENTION, OUTSIDE, interleaved_heads, joined_rows
from ktransformers.checkpoints.gguf.facts import Facts

__all__ = ["GRANITE_MOE"]


def _config(facts: Facts) -> dict[str, Any]:
    softmax_router(facts)
    facts.only("expert_weights_norm", True)
    shared = facts.get("expert_shared_feed_forward_length", facts.size("ffn_gate_shexp.weight", 0))
    return decoder_config(
        facts,
        "granitemoeshared" if shared else "granitemoe",
        **({"shared_intermediate_size": shared} if shared else {}),
        intermediate_size=facts.need("feed_forward_length"),
        num_local_experts=facts.need("expert_count"),
        num_experts_per_tok=facts.need("expert_used_count"),
        embedding_multiplier=facts.need("embedding_scale"),
        residual_multiplier=facts.need("residual_scale"),
        attention_multiplier=facts.need("attention.scale"),
        logits_scaling=facts.need("logit_scale"),
    )


GRANITE_MOE = Architecture(
    "granitemoe",
    _config,
    {
        **OUTSIDE,
        **ATTENTION,
        **interleaved_heads(),
        "block_sparse_moe.router": "ffn_gate_inp",
        "shared_mlp.input_linear.weight": joined_rows("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
        "shared_mlp.output_linear": "ffn_down_shexp",
    },
)
