"""`olmoe`: OLMoE."""

from __future__ import annotations

from typing import Any

from ktransformers.checkpoints.gguf.architectures.base import Architecture, decoder_config, softmax_router
from ktransformers.checkpoints.gguf.architectures.names import ATTENTION, OUTSIDE
from ktransformers.checkpoints.gguf.facts import Facts

__all__ = ["OLMOE"]


def _config(facts: Facts) -> dict[str, Any]:
    softmax_router(facts)
    return decoder_config(
        facts,
        "olmoe",
        intermediate_size=facts.get("expert_feed_forward_length", facts.need("feed_forward_length")),
        num_experts=facts.need("expert_count"),
        num_experts_per_tok=facts.need("expert_used_count"),
        clip_qkv=facts.get("attention.clamp_kqv"),
        # Not in most files. False in OLMoE-1B-7B (config.json), as llama.cpp computes it (src/models/olmoe.cpp).
        norm_topk_prob=facts.get("expert_weights_norm", False),
    )


OLMOE = Architecture("olmoe", _config, {**OUTSIDE, **ATTENTION, "mlp.gate": "ffn_gate_inp"})
