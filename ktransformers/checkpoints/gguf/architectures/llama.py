"""`llama`: Llama, Mistral and others that compute alike; with experts it is Mixtral."""

from __future__ import annotations

from typing import Any

from ktransformers.checkpoints.gguf.architectures.base import Architecture, decoder_config, softmax_router
from ktransformers.checkpoints.gguf.architectures.names import ATTENTION, DENSE, OUTSIDE, interleaved_heads
from ktransformers.checkpoints.gguf.facts import Facts

__all__ = ["LLAMA"]


def _config(facts: Facts) -> dict[str, Any]:
    experts = facts.get("expert_count", 0)
    if not experts:
        biases = {"attention_bias": facts.has("blk.0.attn_q.bias"), "mlp_bias": facts.has("blk.0.ffn_up.bias")}
        return decoder_config(facts, "llama", intermediate_size=facts.need("feed_forward_length"), **biases)
    softmax_router(facts)
    facts.only("expert_weights_norm", True)
    return decoder_config(
        facts,
        "mixtral",
        intermediate_size=facts.need("feed_forward_length"),
        num_local_experts=experts,
        num_experts_per_tok=facts.need("expert_used_count"),
        # The file does not say. Mixtral 8x7B and 8x22B have none (their config.json).
        sliding_window=None,
    )


LLAMA = Architecture(
    "llama",
    _config,
    {**OUTSIDE, **ATTENTION, **interleaved_heads(), **DENSE, "mlp.gate": "ffn_gate_inp"},
)
