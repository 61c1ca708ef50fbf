"""`gpt-oss`: OpenAI's gpt-oss-20b and gpt-oss-120b."""

from __future__ import annotations

from typing import Any

from ktransformers.checkpoints.gguf.architectures.base import Architecture, decoder_config, rope_parameters
from ktransformers.checkpoints.gguf.architectures.names import ATTENTION, OUTSIDE
from ktransformers.checkpoints.gguf.facts import Facts

__all__ = ["GPT_OSS"]


def _config(facts: Facts) -> dict[str, Any]:
    layers = facts.need("block_count", least=1)
    rope = rope_parameters(facts)
    if rope["rope_type"] == "yarn":
        # Not in the file: the ends of the ramp are not rounded to whole dimensions (config.json of both models).
        rope["truncate"] = False
    return decoder_config(
        facts,
        "gpt_oss",
        intermediate_size=facts.get("expert_feed_forward_length", facts.get("feed_forward_length")),
        num_local_experts=facts.need("expert_count"),
        num_experts_per_tok=facts.need("expert_used_count"),
        sliding_window=facts.need("attention.sliding_window"),
        # Not in the file: layers take turns and the first one has the window (config.json; llama.cpp's gpt-oss sets a
        # pattern of 2); the limit of SwiGLU is 7 and its alpha 1.702 (llama.cpp: LLM_FFN_SWIGLU_OAI_MOE).
        layer_types=[("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)],
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        rope_parameters=rope,
        attention_bias=True,
    )


GPT_OSS = Architecture(
    "gpt-oss",
    _config,
    {
        **OUTSIDE,
        **ATTENTION,
        "self_attn.sinks": ("attn_sinks.weight", "attn_sinks"),
        "post_attention_layernorm": ("post_attention_norm", "attn_post_norm"),
        "mlp.router": "ffn_gate_inp",
    },
)
