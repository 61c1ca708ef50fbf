"""Tiny random models built from transformers' own classes: seeded, fp32, in eval mode, weights of realistic spread.

Every builder takes configuration overrides: `make_qwen3_moe(num_hidden_layers=12, hidden_size=16)`.
The vocabulary is 256 bytes and three specials, so that `save_with_tokenizer` fits every one of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

PAD, BOS, EOS = 256, 257, 258
VOCABULARY = 259

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


def make_qwen3_moe(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """8 experts, top-2 with renormalised weights, layer 0 dense."""
    moe = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = {**_COMMON, **moe, "head_dim": 16, "mlp_only_layers": [0], **overrides}
    return _build(Qwen3MoeForCausalLM, Qwen3MoeConfig(**config), seed)


def make_qwen2_moe(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """8 experts and a shared one behind a sigmoid gate."""
    moe = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}
    config = {**_COMMON, **moe, "shared_expert_intermediate_size": 80, **overrides}
    return _build(Qwen2MoeForCausalLM, Qwen2MoeConfig(**config), seed)


def make_deepseek_v3(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """8 routed experts in 4 groups, 1 shared, layer 0 dense, a correction bias that is mostly negative."""
    moe = {
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
    }
    attention = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    config = {**_COMMON, **moe, **attention, "num_key_value_heads": 4, **overrides}
    return _build(DeepseekV3ForCausalLM, DeepseekV3Config(**config), seed)


def make_deepseek_v2(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """8 routed experts in 4 groups of which 2 are taken, 2 shared, layer 0 dense, softmax, weights not renormalised."""
    moe = {
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
    }
    attention = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24}
    config = {**_COMMON, **moe, **attention, "num_key_value_heads": 4, **overrides}
    return _build(DeepseekV2ForCausalLM, DeepseekV2Config(**config), seed)


def make_glm4_moe(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """8 experts and a shared one, layer 0 dense, half of each head rotated, norms on queries and keys."""
    moe = {
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    attention = {"head_dim": 16, "use_qk_norm": True, "attention_bias": True, "rope_parameters": rope}
    return _build(Glm4MoeForCausalLM, Glm4MoeConfig(**{**_COMMON, **moe, **attention, **overrides}), seed)


def make_mixtral(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """4 experts (`num_local_experts`), top-2, every layer sparse."""
    config = {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, **overrides}
    return _build(MixtralForCausalLM, MixtralConfig(**config), seed)


def make_olmoe(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """8 experts, top-2, weights not renormalised."""
    config = {**_COMMON, "num_experts": 8, "num_experts_per_tok": 2, **overrides}
    return _build(OlmoeForCausalLM, OlmoeConfig(**config), seed)


def make_gpt_oss(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """4 experts with biases, gate and up interleaved, matrices transposed, clamped SwiGLU."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    moe = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = {**_COMMON, **moe, "head_dim": 16, "rope_parameters": rope, **overrides}
    return _build(GptOssForCausalLM, GptOssConfig(**config), seed)


def make_granite_moe(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """8 experts at `block_sparse_moe.experts`."""
    config = {**_COMMON, "num_local_experts": 8, "num_experts_per_tok": 2, "attention_multiplier": 0.25, **overrides}
    return _build(GraniteMoeForCausalLM, GraniteMoeConfig(**config), seed)


def make_granite_moe_shared(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """As `make_granite_moe`, with a shared expert and all multipliers other than 1."""
    moe = {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 48}
    scales = {
        "attention_multiplier": 0.25,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 3.0,
    }
    config = {**_COMMON, **moe, **scales, **overrides}
    return _build(GraniteMoeSharedForCausalLM, GraniteMoeSharedConfig(**config), seed)


def make_qwen2_dense(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """No experts; biases on queries, keys and values."""
    return _build(Qwen2ForCausalLM, Qwen2Config(**{**_COMMON, **overrides}), seed)


def make_qwen3_dense(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """No experts; norms on queries and keys."""
    return _build(Qwen3ForCausalLM, Qwen3Config(**{**_COMMON, "head_dim": 16, **overrides}), seed)


def make_starcoder2(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """No experts; a family that GGUF tables of ours do not know."""
    return _build(Starcoder2ForCausalLM, Starcoder2Config(**{**_COMMON, **overrides}), seed)


def make_qwen3_next(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """8 experts and a shared one, layers of linear and of full attention."""
    moe = {
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    attention = {
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }
    config = {**_COMMON, **moe, **attention, **overrides}
    return _build(Qwen3NextForCausalLM, Qwen3NextConfig(**config), seed)


def make_llama_dense(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """No experts at all."""
    return _build(LlamaForCausalLM, LlamaConfig(**{**_COMMON, **overrides}), seed)


def save_with_tokenizer(model: PreTrainedModel, folder: str | Path) -> Path:
    """Writes the model and a byte-level tokenizer (token id = byte value) as a folder that `from_pretrained` reads."""
    model.save_pretrained(folder)
    make_byte_tokenizer().save_pretrained(folder)
    return Path(folder)


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is one token, so multi-byte characters come apart by themselves."""
    tokenizer = Tokenizer(BPE(vocab={symbol: byte for byte, symbol in enumerate(_byte_symbols())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=512
    )


def _byte_symbols() -> list[str]:
    """The printable stand-in of each byte in byte-level vocabularies: Latin-1 is itself, the rest from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _build(model_class: type[PreTrainedModel], config: Any, seed: int) -> PreTrainedModel:
    config.dtype = torch.float32
    model: PreTrainedModel = model_class(config).eval()
    fill(model, seed)
    return model


def fill(model: nn.Module, seed: int = 0) -> None:
    """Seeded weights of realistic spread in every parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            transposed = bool(getattr(module, "is_transposed", False))
            for name, tensor in module.named_parameters(recurse=False):
                tensor.copy_(_spread(name, tensor, transposed, generator))
            for name, buffer in module.named_buffers(recurse=False):
                if name == "e_score_correction_bias":
                    buffer.copy_(torch.rand(buffer.shape, generator=generator) * 0.8 - 0.6)


def _spread(name: str, tensor: torch.Tensor, transposed: bool, generator: torch.Generator) -> torch.Tensor:
    """Gains near 1, biases of order 1, matrices with 1/√fan-in and a log-normal factor per output channel."""
    noise = torch.randn(tensor.shape, generator=generator)
    if name.endswith("bias"):
        return noise * 0.5
    if tensor.dim() == 1:
        return 1.0 + 0.1 * noise
    fan_in = -2 if transposed and tensor.dim() == 3 else -1
    channels = noise.mean(dim=fan_in, keepdim=True) * tensor.shape[fan_in] ** 0.5  # N(0, 1), one per output channel
    spread: torch.Tensor = noise * torch.exp(0.4 * channels) / tensor.shape[fan_in] ** 0.5
    return spread


def moe_layers(model: nn.Module) -> list[str]:
    """Dotted names of the experts modules, in order."""
    return [name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] == "experts"]
