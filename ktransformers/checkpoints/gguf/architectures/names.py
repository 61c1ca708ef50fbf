"""Names that architectures share, and what llama.cpp's converter did to tensors, undone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ktransformers.checkpoints.gguf.architectures.base import Made, TensorName

__all__ = ["ATTENTION", "DENSE", "OUTSIDE", "interleaved_heads", "joined_rows"]

OUTSIDE: dict[str, TensorName] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}

ATTENTION: dict[str, TensorName] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
}

DENSE: dict[str, TensorName] = {
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved_heads() -> dict[str, TensorName]:
    """Query and key matrices of architectures whose rotation turns neighbouring numbers (ggml's "norm" kind), while
    transformers' turns halves: the converter orders each head's rows 0, half, 1, half + 1, … (`LlamaModel.permute` of
    convert_hf_to_gguf.py).
    """

    def undo(count: str) -> Any:
        def make(tensors: Sequence[torch.Tensor], config: Any) -> torch.Tensor:
            (rows,) = tensors
            heads = getattr(config, count)
            by_pair = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
            return by_pair.swapaxes(1, 2).reshape(rows.shape)

        return make

    return {
        f"self_attn.{module}.{kind}": Made((f"{tensor}.{kind}",), undo(count))
        for module, tensor, count in (
            ("q_proj", "attn_q", "num_attention_heads"),
            ("k_proj", "attn_k", "num_key_value_heads"),
        )
        for kind in ("weight", "bias")
    }


def joined_rows(*tensors: str) -> Made:
    """The rows of several matrices, one after the other."""
    return Made(tensors, lambda parts, _: torch.cat(list(parts)))
