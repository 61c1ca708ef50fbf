"""What the rule files of upstream's archive name and this package does not have: tables, no code.

Source: kvcache-ai/ktransformers, archive/ktransformers/optimize/optimize_rules and the classes those files name.
`ktransformers.injection.legacy` reads the tables.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "FORMER_BLOCK_NAMES",
    "NEAREST_BACKENDS",
    "NEAREST_OPS",
    "NEAREST_PREFILL_OPS",
    "RENAMED_CLASSES",
    "RETIRED",
    "VENDORED_MODULES",
]

RETIRED: Mapping[str, tuple[str, ...]] = {
    "rotary embeddings": (
        "RotaryEmbedding",
        "RotaryEmbeddingV2",
        "RotaryEmbeddingV3",
        "RotaryEmbeddingV4",
        "YarnRotaryEmbedding",
        "YarnRotaryEmbeddingV3",
        "DynamicNTKScalingRotaryEmbedding",
        "KQwen3MoeRotaryEmbedding",
        "KSmallthinkerRotaryEmbedding",
        "KGlm4MoeRotaryEmbedding",
    ),
    "norms": (
        "RMSNorm",
        "KQwen2MoeRMSNorm",
        "KQwen3MoeRMSNorm",
        "KQwen3NextRMSNorm",
        "KSmallthinkerRMSNorm",
        "KGlm4MoeRMSNorm",
        "DeepseekV3RMSNormTorch",
        "KDeepseekRMSNormIPEXLLM",
        "KDeepseekV3RMSNormW8A8",
        "KQwen3MoeRMSNormW8A8",
    ),
    "MLPs": (
        "kDeepseekV3MLP",
        "KQwen2MoeMLP",
        "KSmallthinkerDenseMlpBlock",
        "KGlm4MoeMLP",
        "KDeepseekV3MLPW8A8A2V1",
        "KDeepseekV3MLPW8A8A2V2",
    ),
    "attention modules": (
        "KDeepseekV2Attention",
        "KLlamaAttention",
        "flashinfer_attn",
        "deepseek_torch_attn",
        "KQwen2MoeAttention",
        "KQwen3MoeAttention",
        "KSmallthinkerAttention",
        "KGlm4MoeAttention",
        "KQwen3NextAttention",
        "KQwen3NextGatedDeltaNet",
        "KQwen3MoeAttentionIPEXLLM",
        "KDeepseekV2AttentionW8A8A2",
        "KDeepseekV2AttentionW8A8A2Serve",
        "KQwen3MoeAttentionW8A8A2Serve",
    ),
    "MoE blocks": (
        "KDeepseekV2MoE",
        "KDeepseekV3MoE",
        "KDeepseekV3MoEV2",
        "KDeepseekV3MoEW8A8",
        "KQwen2MoeSparseMoeBlock",
        "KQwen2MoeSparseMoeBlockV2",
        "KQwen3MoeSparseMoeBlockV2",
        "KQwen3MoeSparseMoeBlockW8A8",
        "KQwen3NextSparseMoeBlockV2",
        "KMistralSparseMoEBlock",
        "KSmallthinkerMoeBlock",
        "KGlm4MoeMoE",
    ),
    "routers": ("KMoEGate", "KMoEGateQwen2Moe", "KMoEGateDeepSeekV3", "KMoEGateIPEXLLM", "KDeepseekV3GateA2"),
    "model wrappers": ("KDeepseekV2Model", "KQwen2MoeModel", "KLlamaModel"),
    "Marlin linears": ("KLinearMarlin", "VLinearMarlin"),
    "FP8 linears": ("KLinearFP8",),
    "IPEX linears": ("KLinearIPEXLLM",),
    "Ascend linears": ("KLinearTorchW8A8A2",),
    "Ascend experts": ("KExpertsCPUW8A8",),
}
"""Operators in whose place transformers' own module stays, by kind. Those of linears are named as `generate_op` too."""

NEAREST_OPS: Mapping[str, Mapping[str, str]] = {
    # On upstream's GPUs: experts whose weights are quantised there. The kernel on the CPU is what takes their place.
    "KExpertsMarlin": {"generate_op": "KExpertsCPU", "generate_device": "cpu"},
    # 8-bit weights and activations, which is what INT8 is here.
    "KExpertsCPUW8A8": {"generate_op": "KExpertsCPU", "backend": "INT8"},
    "KLinearQ8": {"generate_op": "KLinearCPU", "generate_device": "cpu", "backend": "INT8"},
    # Upstream's files write the device that the results go to.
    "KLinearCPUInfer": {"generate_device": "cpu"},
}
"""`generate_op` → the arguments that say the nearest thing here. A backend that is written stays."""

NEAREST_PREFILL_OPS: Mapping[str, str] = {
    "KExpertsMarlin": "KExpertsTorch",
    "KExpertsCPUW8A8": "KExpertsTorch",
    "KLinearMarlin": "KLinearTorch",
    "VLinearMarlin": "KLinearTorch",
    "KLinearFP8": "KLinearTorch",
    "KLinearQ8": "KLinearTorch",
    "KLinearIPEXLLM": "KLinearTorch",
    "KLinearTorchW8A8A2": "KLinearTorch",
}
"""`prefill_op` → here."""

NEAREST_BACKENDS: Mapping[str, str] = {"llamafile": "auto"}
"""`backend` → here. llamafile computed with a GGUF file's weights as they are."""

VENDORED_MODULES: Mapping[str, tuple[str, ...]] = {
    "modeling_deepseek": ("deepseek_v2",),
    "modeling_deepseek_v3": ("deepseek_v3",),
    "modeling_glm4_moe": ("glm4_moe",),
    "modeling_llama": ("llama",),
    "modeling_mixtral": ("mixtral",),
    # Upstream's Qwen3-MoE took its rotary embedding and its norm from Qwen2-MoE, and its files name them so.
    "modeling_qwen2_moe": ("qwen2_moe", "qwen3_moe"),
    "modeling_qwen3_moe": ("qwen3_moe",),
    "modeling_qwen3_next": ("qwen3_next",),
    "modeling_smallthinker": (),  # transformers has no SmallThinker
}
"""`ktransformers.models.<module>` → the models of transformers that it stood for."""

RENAMED_CLASSES: Mapping[str, Mapping[str, str]] = {
    "deepseek_v2": {
        "DeepseekV2YarnRotaryEmbedding": "DeepseekV2RotaryEmbedding",
        "DeepseekV2LinearScalingRotaryEmbedding": "DeepseekV2RotaryEmbedding",
        "DeepseekV2DynamicNTKScalingRotaryEmbedding": "DeepseekV2RotaryEmbedding",
        "DeepseekV2MoE": "DeepseekV2Moe",
        "MoEGate": "DeepseekV2TopkRouter",
    },
    "deepseek_v3": {
        "DeepseekV3YarnRotaryEmbedding": "DeepseekV3RotaryEmbedding",
        "DeepseekV3LinearScalingRotaryEmbedding": "DeepseekV3RotaryEmbedding",
        "DeepseekV3DynamicNTKScalingRotaryEmbedding": "DeepseekV3RotaryEmbedding",
        "MoEGate": "DeepseekV3TopkRouter",
    },
    # A model of Qwen3-MoE by the names of Qwen2-MoE.
    "qwen3_moe": {
        "Qwen2MoeRotaryEmbedding": "Qwen3MoeRotaryEmbedding",
        "Qwen2MoeRMSNorm": "Qwen3MoeRMSNorm",
    },
}
"""Per model of transformers: classes that the vendored module called otherwise."""

FORMER_BLOCK_NAMES: Mapping[str, str] = {
    "MixtralSparseMoeBlock": "block_sparse_moe",
    "PhimoeSparseMoeBlock": "block_sparse_moe",
    "MiniMaxSparseMoeBlock": "block_sparse_moe",
    "MiniMaxM2SparseMoeBlock": "block_sparse_moe",
}
"""Classes of MoE blocks → what transformers 4 called the attribute that is `mlp` in transformers 5."""
