"""Writes tiny transformers models as GGUF files, as llama.cpp's converter would: its names (from the `gguf` package's
tables), its metadata, its order of rows. What the package cannot quantise, `kquants` does. `test_llama_cpp` holds this
to files that the converter itself wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from transformers import PreTrainedModel

from ktransformers.experts import ExpertsSpec, layer_weights
from tests.checkpoints.gguf.kquants import QUANTIZERS
from tests.models import BOS, EOS, PAD, VOCABULARY, make_byte_tokenizer

Tensors = dict[str, NDArray[np.float32]]
CHAT_TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"


@dataclass
class Wish:
    """How a file is to be written. types: the ggml type of a tensor by a part of its name; the longest match wins."""

    types: dict[str, str] = field(default_factory=lambda: {"": "F32"})
    experts: str = "stacked"
    """Or "merged" (gate and up in one), "single" (a tensor an expert)."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Replaces or adds keys; None leaves one out."""
    drop: tuple[str, ...] = ()
    add: Tensors = field(default_factory=dict)
    split: int = 0
    """Tensors a part; 0: one file."""
    vocabulary: bool = True


def write_gguf(model: PreTrainedModel, path: Path, wish: Wish | None = None) -> list[Path]:
    """The files written: `path`, or its parts."""
    wish = wish or Wish()
    name, metadata = describe(model.config)
    metadata = {**metadata, **(vocabulary() if wish.vocabulary else {}), **wish.metadata}
    tensors = {**tensors_of(model, name, wish.experts), **wish.add}
    kept = {name: tensor for name, tensor in tensors.items() if name not in wish.drop}
    writer = gguf.GGUFWriter(path, name, split_max_tensors=wish.split)
    for key, value in metadata.items():
        add(writer, key if "." in key and key.split(".")[0] in _ROOMS else f"{name}.{key}", value)
    for tensor, numbers in kept.items():
        kind = type_of(tensor, numbers, wish.types)
        writer.add_tensor(tensor, quantize(numbers, kind), raw_dtype=Type[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf")) if wish.split else [path]


_ROOMS = ("general", "tokenizer", "split")


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def quantize(numbers: NDArray[np.float32], kind: str) -> NDArray[Any]:
    if kind in QUANTIZERS:
        blocks: NDArray[Any] = QUANTIZERS[kind](numbers)
        return blocks
    try:
        return np.asarray(gguf.quants.quantize(numbers, Type[kind]))
    except NotImplementedError:
        return arbitrary(numbers.shape, kind)


def arbitrary(shape: tuple[int, ...], kind: str, seed: int = 0) -> NDArray[np.uint8]:
    """Blocks of a type that nothing here can quantise. No byte is above 63, so that every half in them is finite."""
    weights, size = gguf.GGML_QUANT_SIZES[Type[kind]]
    rows = (*shape[:-1], shape[-1] // weights * size)
    return np.random.default_rng(seed).integers(0, 64, rows, dtype=np.uint8)


def type_of(name: str, numbers: NDArray[np.float32], types: dict[str, str]) -> str:
    kind = types[max((part for part in types if part in name), key=len)]
    block = gguf.GGML_QUANT_SIZES[Type[kind]][0]
    return kind if numbers.ndim > 1 and numbers.shape[-1] % block == 0 else "F32"


def vocabulary() -> dict[str, Any]:
    """The byte tokenizer of the other tests."""
    tokens = make_byte_tokenizer().convert_ids_to_tokens(list(range(VOCABULARY)))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if place in (PAD, BOS, EOS) else 1 for place in range(VOCABULARY)],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.padding_token_id": PAD,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


# --- metadata, as the `set_gguf_parameters` of llama.cpp's converter


def describe(config: Any) -> tuple[str, dict[str, Any]]:
    """The architecture's name and its metadata."""
    name, more = _DESCRIBED[config.model_type]
    rope = config.rope_parameters
    described = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(getattr(config, "rms_norm_eps", 0.0)),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if config.model_type in _SAY_VOCABULARY:
        described["vocab_size"] = config.vocab_size
    if rope["rope_type"] in ("linear", "yarn"):
        described |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        described["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        kept = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attn_factor"}
        described |= {
            f"rope.scaling.yarn_{name}": float(rope[key]) for key, name in kept.items() if rope.get(key) is not None
        }
        if rope.get("mscale_all_dim"):
            described["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return name, {**described, **more(config)}


def _head(config: Any) -> dict[str, Any]:
    return {"rope.dimension_count": config.hidden_size // config.num_attention_heads}


def _keys(config: Any) -> dict[str, Any]:
    return {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}


def _experts(count: str, wide: str | None = None) -> Callable[[Any], dict[str, Any]]:
    def described(config: Any) -> dict[str, Any]:
        wided = {} if wide is None else {"expert_feed_forward_length": getattr(config, wide)}
        return {"expert_count": getattr(config, count), "expert_used_count": config.num_experts_per_tok, **wided}

    return described


def _qwen2_moe(config: Any) -> dict[str, Any]:
    shared = {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size}
    return {**_experts("num_experts", "moe_intermediate_size")(config), **shared}


def _qwen3_moe(config: Any) -> dict[str, Any]:
    return {**_keys(config), **_experts("num_experts", "moe_intermediate_size")(config)}


def _gpt_oss(config: Any) -> dict[str, Any]:
    window = {"attention.sliding_window": config.sliding_window}
    return {**_keys(config), **_experts("num_local_experts", "intermediate_size")(config), **window}


def _routing(config: Any) -> dict[str, Any]:
    return {
        **_experts("n_routed_experts", "moe_intermediate_size")(config),
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": bool(config.norm_topk_prob),
    }


def _glm4_moe(config: Any) -> dict[str, Any]:
    rotated = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    groups = {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    return {
        **_keys(config),
        **_routing(config),
        **groups,
        "rope.dimension_count": rotated,
        "expert_gating_func": 2,
        "nextn_predict_layers": 0,
    }


def _deepseek(config: Any) -> dict[str, Any]:
    sigmoid = config.model_type == "deepseek_v3"
    return {
        **_routing(config),
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        # As files that keep keys and values compressed have it.
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "expert_gating_func": 2 if sigmoid else 1,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def _granite(config: Any) -> dict[str, Any]:
    shared = getattr(config, "shared_intermediate_size", None)
    return {
        **_head(config),
        **_experts("num_local_experts")(config),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "attention.scale": float(config.attention_multiplier),
        "logit_scale": float(config.logits_scaling),
        "expert_shared_feed_forward_length": shared,
    }


def _mixtral(config: Any) -> dict[str, Any]:
    return {**_head(config), **_experts("num_local_experts")(config)}


def _starcoder2(config: Any) -> dict[str, Any]:
    return {"attention.layer_norm_epsilon": float(config.norm_epsilon), "attention.layer_norm_rms_epsilon": None}


# The others' vocabulary is as large as their list of tokens.
_SAY_VOCABULARY = ("llama", "mixtral", "deepseek_v2", "deepseek_v3", "granitemoe", "granitemoeshared")

_DESCRIBED: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "llama": ("llama", lambda config: {**_head(config), **_keys(config)}),
    "mixtral": ("llama", _mixtral),
    "qwen2": ("qwen2", lambda _: {}),
    "qwen3": ("qwen3", _keys),
    "qwen2_moe": ("qwen2moe", _qwen2_moe),
    "qwen3_moe": ("qwen3moe", _qwen3_moe),
    "olmoe": ("olmoe", _experts("num_experts")),
    "gpt_oss": ("gpt-oss", _gpt_oss),
    "glm4_moe": ("glm4moe", _glm4_moe),
    "granitemoe": ("granitemoe", _granite),
    "granitemoeshared": ("granitemoe", _granite),
    "starcoder2": ("starcoder2", _starcoder2),
    "deepseek_v2": ("deepseek2", _deepseek),
    "deepseek_v3": ("deepseek2", _deepseek),
}


# --- tensors, as its `modify_tensors`


def tensors_of(model: PreTrainedModel, name: str, experts: str = "stacked") -> Tensors:
    layers = model.config.num_hidden_layers
    names = gguf.get_tensor_name_map(_architecture(name), layers)
    tensors: Tensors = {}
    stacks = [n for n, _ in model.named_modules() if n.endswith(".experts")]
    tied = model.config.tie_word_embeddings
    for parameter, tensor in model.state_dict().items():
        if any(parameter.startswith(f"{stack}.") for stack in stacks) or (tied and parameter == "lm_head.weight"):
            continue
        for written, numbers in _written(parameter, tensor, model.config, names):
            tensors[written] = numbers.detach().float().numpy()
    for stack in stacks:
        tensors |= _stack(model, stack, experts)
    return tensors


def _written(parameter: str, tensor: torch.Tensor, config: Any, names: gguf.TensorNameMap) -> Any:
    layer = parameter.split(".")[2] if ".layers." in parameter else ""
    if parameter.endswith("shared_mlp.input_linear.weight"):
        gate, up = tensor.chunk(2)
        return [(f"blk.{layer}.ffn_gate_shexp.weight", gate), (f"blk.{layer}.ffn_up_shexp.weight", up)]
    if parameter.endswith("kv_b_proj.weight"):
        split = tensor.view(config.num_attention_heads, config.qk_nope_head_dim + config.v_head_dim, -1)
        keys, values = torch.split(split, [config.qk_nope_head_dim, config.v_head_dim], dim=1)
        keys = keys.transpose(1, 2).contiguous()
        return [(f"blk.{layer}.attn_k_b.weight", keys), (f"blk.{layer}.attn_v_b.weight", values.contiguous())]
    if parameter.endswith("e_score_correction_bias"):
        return [(f"blk.{layer}.exp_probs_b.bias", tensor)]
    if config.model_type in ("llama", "mixtral", "granitemoe", "granitemoeshared"):
        tensor = _permuted(parameter, tensor, config)
    aliases = {"block_sparse_moe.router": "block_sparse_moe.router.layer"}
    module = next((parameter.replace(a, b) for a, b in aliases.items() if a in parameter), parameter)
    written = names.get_name(module, try_suffixes=(".weight", ".bias"))
    assert written is not None, f"the gguf package has no name for {parameter}"
    return [(written if "." in written.removeprefix("blk.").lstrip("0123456789.") else f"{written}.weight", tensor)]


def _permuted(parameter: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(parameter.split(".")[-2])
    if heads is None:
        return tensor
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _stack(model: PreTrainedModel, stack: str, form: str) -> Tensors:
    module = model.get_submodule(stack)
    views = layer_weights(module, ExpertsSpec.from_module(module))
    block = f"blk.{stack.split('.')[2]}"
    parts = {key: getattr(views, key) for key in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")}
    given = {key: view.float().contiguous().numpy() for key, view in parts.items() if view is not None}
    tensors = {f"{block}.ffn_{key[:-5]}_exps.bias": view for key, view in given.items() if key.endswith("_bias")}
    matrices = {key: view for key, view in given.items() if not key.endswith("_bias")}
    if form == "single":
        single = {(key, e): view[e] for key, view in matrices.items() for e in range(len(view))}
        return {**tensors, **{f"{block}.ffn_{key}.{e}.weight": view for (key, e), view in single.items()}}
    if form == "merged":
        both = np.concatenate([matrices.pop("gate"), matrices.pop("up")], axis=1)
        tensors[f"{block}.ffn_gate_up_exps.weight"] = both
    return {**tensors, **{f"{block}.ffn_{key}_exps.weight": view for key, view in matrices.items()}}


def _architecture(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, said in gguf.MODEL_ARCH_NAMES.items() if said == name)
