"""Rule files of every shape in upstream's archive, written anew from a table: which rules each one has, in its order.

Layer ranges are those of a model of eight layers, split evenly among the devices that a file names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

Rules = list[dict[str, Any]]

LAYERS = 8
_ALL = r"^model\.layers\."
_V2, _V3 = "modeling_deepseek.DeepseekV2", "modeling_deepseek_v3.DeepseekV3"
_NO_KV_B = _ALL + r"(?!.*self_attn\.kv_b_proj).*$"
_NO_SHARED_GATE = _ALL + r"(?!.*mlp\.shared_expert_gate).*$"


def _rule(to: str, name: str | None = None, of: str | None = None, **kwargs: Any) -> dict[str, Any]:
    """`of` is a vendored class without its package, or a whole path; `to` an operator without its package."""
    match = {} if name is None else {"name": name}
    if of is not None:
        match["class"] = f"ktransformers.models.{of}" if of.startswith("modeling_") else of
    path = to if to == "default" else f"ktransformers.operators.{to}"
    return {"match": match, "replace": {"class": path, "kwargs": kwargs} if kwargs else {"class": path}}


def _on(device: str, to: str, name: str | None = None, of: str | None = None, **kwargs: Any) -> dict[str, Any]:
    return _rule(to, name, of, generate_device=device, prefill_device=device, **kwargs)


def _linear(name: str, op: str = "KLinearMarlin", device: str = "cuda", **kwargs: Any) -> dict[str, Any]:
    return _on(
        device,
        kwargs.pop("to", "linear.KTransformersLinear"),
        name,
        "torch.nn.Linear",
        generate_op=op,
        prefill_op=kwargs.pop("prefill_op", "KLinearTorch"),
        **kwargs,
    )


def _experts(to: str = "experts.KTransformersExperts", out: str = "cuda", layers: str = ".*", **kwargs: Any) -> Any:
    block = kwargs.pop("block", "mlp")
    arguments = {
        "prefill_device": out,
        "prefill_op": "KExpertsTorch",
        "generate_device": "cpu",
        "generate_op": "KExpertsCPU",
        "out_device": out,
    }
    return _rule(to, rf"{_ALL}{layers}\.{block}\.experts$", **(arguments | kwargs)) | {"recursive": False}


def _model(to: str, **kwargs: Any) -> dict[str, Any]:
    return _rule(f"models.{to}", "^model$", per_layer_prefill_intput_threshold=0, **kwargs)


_EMBED = _on("cpu", "default", "^model.embed_tokens")


def _deepseek(
    version: str = "V3",
    *,
    rope: str = "YarnRotaryEmbeddingV3",
    linears: Rules | None = None,
    suffix: str = "",
    gate: str | None = "gate.KMoEGate",
    experts: dict[str, Any] | None = None,
    attention: str = "attention.KDeepseekV2Attention",
    device: str = "cuda",
    extra: Rules | None = None,
    **model: Any,
) -> Rules:
    family = _V2 if version == "V2" else _V3
    block = f"experts.KDeepseek{version}MoE{suffix}"
    yarn = "Yarn" if version == "V2" else ""
    rules = [_on(device, f"RoPE.{rope}", of=f"{family}{yarn}RotaryEmbedding")]
    rules += [_linear(_NO_KV_B), _linear("^lm_head$")] if linears is None else linears
    rules += [_on(device, block, _ALL + r".*\.mlp$", f"{family}MoE")]
    rules += [] if gate is None else [_on(f"{device}:0", gate, of="modeling_deepseek_v3.MoEGate")]
    rules += [_experts(f"experts.KTransformersExperts{suffix}", device, **(experts or {}))]
    rules += [_on(device, attention, _ALL + r".*\.self_attn$", absorb_for_prefill=False)]
    return [*rules, _model("KDeepseekV2Model", **model), _EMBED, *(extra or [])]


def _serving(family: str, norm: str, mlp: str, device: str = "cuda") -> Rules:
    return [
        _on(device, f"layernorm.{norm}", of=f"{family}RMSNorm"),
        _on(device, f"mlp.{mlp}", of=f"{family}MLP"),
    ]


_V3_SERVING = _serving(_V3, "RMSNorm", "kDeepseekV3MLP")


def _many(version: str, devices: list[str], linear: str = "KLinearMarlin", *, marlin: int = 0) -> Rules:
    """Every kind of rule once a device, each for its own layers; `marlin`: layers whose experts a GPU computes."""
    family = _V2 if version == "V2" else _V3
    yarn = ("Yarn", "") if version == "V2" else ("", "V3")
    share = LAYERS // len(devices)
    ranges = [f"({'|'.join(str(n) for n in range(i * share, (i + 1) * share))})" for i in range(len(devices))]
    parts = list(zip(devices, ranges, strict=True))
    gate = "gate.KMoEGate"
    rules = [_EMBED]
    rope = f"{family}{yarn[0]}RotaryEmbedding"
    rules += [_on(d, f"RoPE.YarnRotaryEmbedding{yarn[1]}", rf"{_ALL}{r}\.", rope) for d, r in parts]
    rules += [_linear(rf"{_ALL}{r}\.(?!self_attn\.kv_b_proj).*$", linear, d) for d, r in parts]
    rules += [_on(d, f"experts.KDeepseek{version}MoE", rf"{_ALL}{r}\.mlp$", f"{family}MoE") for d, r in parts]
    if version == "V3":
        rules += [_on(d, gate, rf"{_ALL}{r}\.mlp\.gate$", "modeling_deepseek_v3.MoEGate") for d, r in parts]
    for layer in range(1, 1 + marlin):
        on_gpu = {"generate_op": "KExpertsMarlin", "generate_device": "cuda:0"}
        rules += [_experts(out="cuda:0", layers=f"({layer})", **on_gpu)]
    rules += [_experts(out=d, layers=r) for d, r in parts]
    rules += [_on(d, "attention.KDeepseekV2Attention", rf"{_ALL}{r}\.self_attn$") for d, r in parts]
    cuts = {(i + 1) * share: d for i, d in enumerate(devices[1:])}
    rules += [_model("KDeepseekV2Model", transfer_map=cuts)]
    last = devices[-1]
    if linear != "KLinearFP8":
        rules += [_linear("^lm_head$", "KLinearMarlin", last)]
    rules += [_on(d, "default", rf"{_ALL}{r}\.") for d, r in parts[:-1]]
    if len(devices) == 8:
        return [*rules, _on(last, "default", rf"{_ALL}{ranges[-1]}\."), _on(last, "default", "^model.norm")]
    return [*rules, _on(last, "default", rf"({_ALL}{ranges[-1]}\.)|(model.norm)")]


def _cuda(count: int) -> list[str]:
    return [f"cuda:{index}" for index in range(count)]


def _v2_lite_half_on_the_cpu() -> Rules:
    rules = _many("V2", ["cuda:0", "cpu"])
    at = next(i for i, rule in enumerate(rules) if rule["replace"].get("kwargs", {}).get("generate_op"))
    halves = ["(0|1|2|3)", "(4|5|6|7)"]
    rules[at : at + 2] = [
        _linear(rf"{_ALL}{halves[0]}\.(?!self_attn).*$", "KLinearMarlin", "cuda:0"),
        _linear(rf"{_ALL}{halves[1]}\.(?!self_attn).*$", "KLinearCPUInfer", "cpu", out_device="cpu"),
    ]
    gates = [
        _on(d, "gate.KMoEGate", rf"{_ALL}{r}\.mlp\.gate$", "modeling_deepseek_v3.MoEGate")
        for d, r in zip(["cuda:0", "cpu"], halves, strict=True)
    ]
    return [*rules[:7], *gates, *rules[7:]]


def _qwen(
    version: int, *, serve: bool = True, backend: str | None = None, device: str = "cuda", attention: str | None = None
) -> Rules:
    family = f"modeling_qwen{version}_moe.Qwen{version}Moe"
    named = {} if backend is None else {"backend": backend}
    suffix = "V2" if serve else ""
    head = [_linear("^lm_head$", "VLinearMarlin")] if serve else []
    rules = [_on(device, "RoPE.RotaryEmbedding", of="modeling_qwen2_moe.Qwen2MoeRotaryEmbedding"), *head]
    rules += [_linear(_NO_SHARED_GATE if serve else _ALL + ".*$")]
    rules += [
        _on(device, f"experts.KQwen{version}MoeSparseMoeBlock{suffix}", _ALL + r".*\.mlp$", f"{family}SparseMoeBlock")
    ]
    rules += [_experts(f"experts.KTransformersExperts{suffix}", device, **named)]
    if serve:
        to = attention or f"balance_serve_attention.KQwen{version}MoeAttention"
        rules += [_on(device, to, _ALL + r".*\.self_attn$")]
    rules += [_model("KQwen2MoeModel"), _EMBED]
    if serve:
        return [*rules, *_serving(family, f"KQwen{version}MoeRMSNorm", "KQwen2MoeMLP", device)]
    return [*rules, _linear("^lm_head"), _on(device, "default", _ALL)]


def _qwen2_many() -> Rules:
    """Its patterns for linears end at the layer and find none."""
    family = "modeling_qwen2_moe.Qwen2Moe"
    rules: Rules = []
    for device, layers in (("cuda:0", "(0|1|2)"), ("cuda:1", "([3-7])")):
        rules += [
            _on(device, "RoPE.RotaryEmbedding", rf"{_ALL}{layers}\.", f"{family}RotaryEmbedding"),
            _linear(rf"{_ALL}{layers}$", "KLinearMarlin", device),
            _rule("experts.KQwen2MoeSparseMoeBlock", rf"{_ALL}{layers}\.mlp$", f"{family}SparseMoeBlock"),
            _experts(out=device, layers=layers),
        ]
    rules += [_EMBED, _on("cuda:1", "default", "^model.norm"), _linear("^lm_head", "KLinearMarlin", "cuda:1")]
    rules += [_model("KQwen2MoeModel", transfer_map={3: "cuda:1"})]
    return [*rules, *(_on(d, "default", rf"{_ALL}{r}\.") for d, r in (("cuda:0", "(0|1|2)"), ("cuda:1", "([3-7])")))]


def _qwen3_next() -> Rules:
    family, serve = "modeling_qwen3_next.Qwen3Next", "balance_serve_attention.KQwen3Next"
    return [
        _on("cuda", "RoPE.KQwen3MoeRotaryEmbedding", of=f"{family}RotaryEmbedding"),
        _linear("^lm_head$", "VLinearMarlin"),
        _linear(_NO_SHARED_GATE),
        _on("cuda", "experts.KQwen3NextSparseMoeBlockV2", _ALL + r".*\.mlp$", f"{family}SparseMoeBlock"),
        _experts("experts.KTransformersExpertsV2"),
        _on("cuda", f"{serve}GatedDeltaNet", of=f"{family}GatedDeltaNet"),
        _on("cuda", f"{serve}Attention", of=f"{family}Attention"),
        _EMBED,
        *_serving(family, "KQwen3NextRMSNorm", "KQwen2MoeMLP"),
    ]


def _other(family: str, name: str, block: str, block_class: str, mlp: str, mlp_class: str, experts: str) -> Rules:
    """GLM-4 and SmallThinker, which write `prefill_op: None`."""
    return [
        _on("cuda", f"RoPE.K{name}RotaryEmbedding", of=f"{family}RotaryEmbedding"),
        _linear("^lm_head$", "VLinearMarlin"),
        _linear(_NO_SHARED_GATE),
        _on("cuda", f"experts.K{block_class}", rf"{_ALL}.*\.{block}$", f"{family.rpartition('.')[0]}.{block_class}"),
        _experts(f"experts.{experts}", block=block, prefill_op="None"),
        _on("cuda", f"balance_serve_attention.K{name}Attention", _ALL + r".*\.self_attn$"),
        _EMBED,
        _on("cuda", f"layernorm.K{name}RMSNorm", of=f"{family}RMSNorm"),
        _on("cuda", f"mlp.{mlp}", of=f"{family.rpartition('.')[0]}.{mlp_class}"),
    ]


def _mixtral() -> Rules:
    block = "modeling_mixtral.MixtralSparseMoeBlock"
    return [
        _on("cuda", "RoPE.RotaryEmbedding", of="modeling_mixtral.MixtralRotaryEmbedding"),
        _linear(_ALL + ".*$"),
        _linear("^lm_head$"),
        _rule("experts.KMistralSparseMoEBlock", _ALL + r".*\.block_sparse_moe$", block),
        _experts(block="block_sparse_moe"),
        _EMBED,
        _on("cuda", "default", _ALL + r".*\."),
    ]


def _internlm() -> Rules:
    return [
        _on("cuda", "RoPE.RotaryEmbeddingV2", of="modeling_llama.LlamaRotaryEmbedding"),
        _EMBED,
        _model("KLlamaModel"),
        _on("cuda", "attention.KLlamaAttention", _ALL + r".*\.self_attn$"),
    ]


def _ascend(attention: str) -> Rules:
    to = {"to": "ascend.ascend_linear.KTransformersLinearW8A8A2", "device": "npu", "prefill_op": "KLinearTorchW8A8A2"}
    mlp = "ascend.ascend_mlp.KDeepseekV3MLPW8A8A2"
    experts = "ascend.ascend_experts.K"
    return [
        _on("npu", "RoPE.YarnRotaryEmbeddingV3", of=f"{_V3}RotaryEmbedding"),
        _linear("^lm_head$", "KLinearTorchW8A8A2", **to),
        _linear(_NO_KV_B, "KLinearTorchW8A8A2", **to),
        _on("npu", f"{experts}DeepseekV3MoEW8A8", _ALL + r".*\.mlp$", f"{_V3}MoE"),
        _on("npu", f"{mlp}V1", _ALL + r"([0-2])\.mlp$", f"{_V3}MLP"),
        _on("npu", f"{mlp}V2", _ALL + r".*\.mlp\.shared_experts$", f"{_V3}MLP"),
        _on("npu:0", "ascend.ascend_gate.KDeepseekV3GateA2", of="modeling_deepseek_v3.MoEGate"),
        _experts(f"{experts}TransformersExpertsW8A8", "npu", generate_op="KExpertsCPUW8A8"),
        _rule(f"{experts}ExpertsCPUW8A8", _ALL + r".*\.mlp\.experts$", "ktransformers.operators.experts.KExpertsCPU"),
        _on("npu", f"ascend.ascend_attention.{attention}", _ALL + r".*\.self_attn$", absorb_for_prefill=False),
        _model("KDeepseekV2Model"),
        _EMBED,
        _on("npu", "ascend.ascend_layernorm.KDeepseekV3RMSNormW8A8", "^model..*norm"),
    ]


def _ascend_qwen() -> Rules:
    to = {"to": "ascend.ascend_linear.KTransformersLinearW8A8A2", "device": "npu", "prefill_op": "KLinearTorchW8A8A2"}
    dump = {"dump_enable": False, "dump_dir": "/mnt/dump"}
    skips = [r"(?!.*mlp\.shared_expert_gate)(?!.*mlp\.gate)", r"(?!.*mlp\.gate)(?!.*self_attn\.kv_b_proj)"]
    family, block = "modeling_qwen3_moe.Qwen3Moe", "ascend.ascend_experts.KQwen3MoeSparseMoeBlockW8A8"
    attention = "ascend.ascend_attention.KQwen3MoeAttentionW8A8A2Serve"
    return [
        _on("npu", "RoPE.RotaryEmbedding", of="modeling_qwen2_moe.Qwen2MoeRotaryEmbedding"),
        _linear("^lm_head$", "KLinearTorchW8A8A2", **to),
        *(_linear(rf"{_ALL}{skip}(?!.*mlp\.experts).*$", "KLinearTorchW8A8A2", **to) for skip in skips),
        _on("npu", block, _ALL + r".*\.mlp$", f"{family}SparseMoeBlock", **dump),
        _on("npu", attention, _ALL + r".*\.self_attn$", absorb_for_prefill=False, **dump),
        _model("KQwen2MoeModel"),
        _EMBED,
        _on("npu", "ascend.ascend_layernorm.KQwen3MoeRMSNormW8A8", of=f"{family}RMSNorm", **dump),
    ]


def _intel(version: str) -> Rules:
    ipex = {"op": "KLinearIPEXLLM", "prefill_op": "KLinearIPEXLLM", "device": "xpu"}
    norm = _on("xpu", "layernorm.KDeepseekRMSNormIPEXLLM", of=f"{_V2 if version == 'V2' else _V3}RMSNorm")
    if version == "V2":
        linears = [_linear(_NO_KV_B, **ipex)]
        return _deepseek("V2", rope="YarnRotaryEmbedding", linears=linears, gate=None, device="xpu", extra=[norm])
    linears = [_linear(_NO_KV_B, **ipex), _linear("^lm_head$", **ipex)]
    return _deepseek("V3", linears=linears, gate="gate.KMoEGateIPEXLLM", device="xpu", extra=[norm])


def _intel_qwen() -> Rules:
    """The one file that names transformers' own classes."""
    family = "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3Moe"
    ipex = {"op": "KLinearIPEXLLM", "prefill_op": "KLinearIPEXLLM", "device": "xpu"}
    return [
        _on("xpu", "RoPE.KQwen3MoeRotaryEmbedding", of=f"{family}RotaryEmbedding"),
        _linear("^lm_head$", **ipex),
        _linear(_NO_SHARED_GATE, **ipex),
        _on("xpu", "experts.KQwen3MoeSparseMoeBlockV2", _ALL + r".*\.mlp$", f"{family}SparseMoeBlock"),
        _experts("experts.KTransformersExpertsV2", "xpu"),
        _on("xpu", "attention.KQwen3MoeAttentionIPEXLLM", _ALL + r".*\.self_attn$"),
        _model("KQwen2MoeModel"),
        _EMBED,
        *_serving(family, "KDeepseekRMSNormIPEXLLM", "KQwen2MoeMLP", "xpu"),
    ]


_FP8 = [_linear(_NO_KV_B, "KLinearFP8")]
_FP8_SERVING: dict[str, Any] = {
    "linears": [*_FP8, _linear("^lm_head$", "VLinearMarlin")],
    "suffix": "V2",
    "attention": "attention.flashinfer_attn",
    "extra": _V3_SERVING,
}
_SERVE = _FP8_SERVING | {"linears": [_linear(_NO_KV_B, "VLinearMarlin"), _linear("^lm_head$", "VLinearMarlin")]}
_V2_ONE: dict[str, Any] = {"version": "V2", "rope": "YarnRotaryEmbedding", "gate": None}
_NPU = [_linear(_NO_KV_B, "KLinearTorch", "npu"), _linear("^lm_head$", "KLinearTorch", "npu")]
_ROCM = [_linear("^lm_head$", "KLinearCPUInfer"), _linear(_NO_KV_B, "KLinearQ8", "cpu")]
_GLM, _SMALL = "modeling_glm4_moe.Glm4Moe", "modeling_smallthinker.Smallthinker"

# File of upstream's → number of its rules, the model it is for, and how it is written here.
FILES: dict[str, tuple[int, str, Callable[[], Rules]]] = {
    "DeepSeek-V2-Chat-multi-gpu-4": (27, "deepseek_v2", lambda: _many("V2", _cuda(4))),
    "DeepSeek-V2-Chat-multi-gpu": (15, "deepseek_v2", lambda: _many("V2", _cuda(2))),
    "DeepSeek-V2-Chat": (8, "deepseek_v2", lambda: _deepseek(**_V2_ONE)),
    "DeepSeek-V2-Lite-Chat-gpu-cpu": (17, "deepseek_v2", _v2_lite_half_on_the_cpu),
    "DeepSeek-V2-Lite-Chat-multi-gpu": (15, "deepseek_v2", lambda: _many("V2", _cuda(2))),
    "DeepSeek-V2-Lite-Chat": (8, "deepseek_v2", lambda: _deepseek(**_V2_ONE)),
    "DeepSeek-V3-Chat-amx": (9, "deepseek_v3", lambda: _deepseek(experts={"backend": "AMXInt8"})),
    "DeepSeek-V3-Chat-fp8-linear-ggml-experts-serve-amx": (
        11,
        "deepseek_v3",
        lambda: _deepseek(**_FP8_SERVING, experts={"backend": "llamafile"}),
    ),
    "DeepSeek-V3-Chat-fp8-linear-ggml-experts-serve": (11, "deepseek_v3", lambda: _deepseek(**_FP8_SERVING)),
    "DeepSeek-V3-Chat-fp8-linear-ggml-experts": (8, "deepseek_v3", lambda: _deepseek(linears=_FP8)),
    "DeepSeek-V3-Chat-multi-gpu-4": (31, "deepseek_v3", lambda: _many("V3", _cuda(4))),
    "DeepSeek-V3-Chat-multi-gpu-8": (60, "deepseek_v3", lambda: _many("V3", _cuda(8))),
    "DeepSeek-V3-Chat-multi-gpu-fp8-linear-ggml-experts": (
        17,
        "deepseek_v3",
        lambda: [*_many("V3", _cuda(2), "KLinearFP8"), _on("cuda:1", "default", "^lm_head")],
    ),
    "DeepSeek-V3-Chat-multi-gpu-marlin": (19, "deepseek_v3", lambda: _many("V3", _cuda(2), marlin=2)),
    "DeepSeek-V3-Chat-multi-gpu": (17, "deepseek_v3", lambda: _many("V3", _cuda(2))),
    "DeepSeek-V3-Chat-npu": (9, "deepseek_v3", lambda: _deepseek(linears=_NPU, device="npu")),
    "DeepSeek-V3-Chat-serve": (11, "deepseek_v3", lambda: _deepseek(**_SERVE)),
    "DeepSeek-V3-Chat": (9, "deepseek_v3", _deepseek),
    "Glm4Moe-serve": (
        9,
        "glm4_moe",
        lambda: _other(_GLM, "Glm4Moe", "mlp", "Glm4MoeMoE", "KGlm4MoeMLP", "Glm4MoeMLP", "KGlm4Experts"),
    ),
    "Internlm2_5-7b-Chat-1m": (4, "llama", _internlm),
    "Mixtral": (7, "mixtral", _mixtral),
    "Moonlight-16B-A3B-serve": (11, "deepseek_v3", lambda: _deepseek(**_SERVE, rope="RotaryEmbeddingV4")),
    "Moonlight-16B-A3B": (9, "deepseek_v3", lambda: _deepseek(rope="RotaryEmbeddingV3")),
    "Qwen2-57B-A14B-Instruct-multi-gpu": (14, "qwen2_moe", _qwen2_many),
    "Qwen2-57B-A14B-Instruct": (8, "qwen2_moe", lambda: _qwen(2, serve=False)),
    "Qwen2-serve-amx": (10, "qwen2_moe", lambda: _qwen(2, backend="AMXInt8")),
    "Qwen2-serve": (10, "qwen2_moe", lambda: _qwen(2)),
    "Qwen3Moe-serve-amx": (10, "qwen3_moe", lambda: _qwen(3, backend="AMXBF16")),
    "Qwen3Moe-serve": (10, "qwen3_moe", lambda: _qwen(3)),
    "Qwen3Next-serve": (10, "qwen3_next", _qwen3_next),
    # transformers has no SmallThinker; Granite's MoE is a model with experts at the same place.
    "Smallthinker-serve": (
        9,
        "granitemoe",
        lambda: _other(
            _SMALL,
            "Smallthinker",
            "block_sparse_moe",
            "SmallthinkerMoeBlock",
            "KSmallthinkerDenseMlpBlock",
            "SmallthinkerDenseMlpBlock",
            "KSmallthinkerExperts",
        ),
    ),
    "npu/DeepSeek-V3-Chat-300IA2-npu-serve": (13, "deepseek_v3", lambda: _ascend("KDeepseekV2AttentionW8A8A2Serve")),
    "npu/DeepSeek-V3-Chat-300IA2-npu": (13, "deepseek_v3", lambda: _ascend("KDeepseekV2AttentionW8A8A2")),
    "npu/Qwen3-Chat-300IA2-npu-serve": (9, "qwen3_moe", _ascend_qwen),
    "rocm/DeepSeek-V3-Chat": (9, "deepseek_v3", lambda: _deepseek(linears=_ROCM)),
    "xpu/DeepSeek-V2-Chat": (8, "deepseek_v2", lambda: _intel("V2")),
    "xpu/DeepSeek-V3-Chat": (10, "deepseek_v3", lambda: _intel("V3")),
    "xpu/Qwen3Moe-Chat": (10, "qwen3_moe", _intel_qwen),
}


def legacy_text(name: str) -> str:
    """The file as YAML."""
    text: str = yaml.safe_dump(FILES[name][2](), sort_keys=False)
    return text
