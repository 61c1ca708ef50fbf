"""`qwen2`, `qwen3`, and their mixtures `qwen2moe`, `qwen3moe`."""

from __future__ import annotations

from typing import Any

from ktransformers.checkpoints.gguf.architectures.base import Architecture, decoder_config, softmax_router
from ktransformers.checkpoints.gguf.architectures.names import ATTENTION, DENSE, OUTSIDE
from ktransformers.checkpoints.gguf.facts import Facts

__all__ = ["QWEN2", "QWEN2_MOE", "QWEN3", "QWEN3_MOE"]


def _dense(model_type: str, **more: Any) -> Any:
    return lambda facts: decoder_config(
        facts, model_type, intermediate_size=facts.need("feed_forward_length"), use_sliding_window=False, **more
    )


def _qwen2_moe(facts: Facts) -> dict[str, Any]:
    return decoder_config(
        facts,
        "qwen2_moe",
        **_mixture(facts),
        shared_expert_intermediate_size=facts.get(
            "expert_shared_feed_forward_length", facts.size("ffn_gate_shexp.weight", 0)
        ),
        # Not in most files. False in Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B (config.json), as llama.cpp computes them
        # (src/models/qwen2moe.cpp: no normalisation).
        norm_topk_prob=facts.get("expert_weights_norm", False),
    )


def _qwen3_moe(facts: Facts) -> dict[str, Any]:
    # Not in most files. True in all Qwen3 mixtures (config.json) and in llama.cpp (src/models/qwen3moe.cpp); the
    # default of transformers' class is False.
    normalised = facts.get("expert_weights_norm", True)
    return decoder_config(facts, "qwen3_moe", **_mixture(facts), norm_topk_prob=normalised)


def _mixture(facts: Facts) -> dict[str, Any]:
    softmax_router(facts)
    sparse = set(facts.layers_with("ffn_gate_inp.weight"))
    layers = facts.need("block_count", least=1)
    return {
        "num_experts": facts.need("expert_count"),
        "num_experts_per_tok": facts.need("expert_used_count"),
        "moe_intermediate_size": facts.get("expert_feed_forward_length", facts.size("ffn_down_exps.weight", -1)),
        "mlp_only_layers": [layer for layer in range(layers) if layer not in sparse],
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
    }


_NAMES = {**OUTSIDE, **ATTENTION, **DENSE}

QWEN2 = Architecture("qwen2", _dense("qwen2"), _NAMES)
QWEN3 = Architecture("qwen3", _dense("qwen3"), _NAMES)
QWEN2_MOE = Architecture(
    "qwen2moe",
    _qwen2_moe,
    {
        **_NAMES,
        "mlp.gate": "ffn_gate_inp",
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
        "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    },
)
QWEN3_MOE = Architecture("qwen3moe", _qwen3_moe, {**_NAMES, "mlp.gate": "ffn_gate_inp"})
