"""What an architecture of GGUF files is: a transformers configuration made of metadata, and names for its tensors.

Names are looked up from the model's side: `self_attn.q_proj` in the table of an architecture says which tensor of the
block is that module's weight (and bias). Experts need no table: they are called alike everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ktransformers.checkpoints.gguf.facts import Facts

__all__ = [
    "SIGMOID",
    "SOFTMAX",
    "Architecture",
    "Made",
    "TensorName",
    "decoder_config",
    "rope_parameters",
    "softmax_router",
]

SOFTMAX, SIGMOID = 1, 2  # LLAMA_EXPERT_GATING_FUNC_TYPE_*


@dataclass(frozen=True)
class Made:
    """A parameter that is made of several tensors of the file, or not stored as it is used.

    tensors: their names in the block, in the order in which `make` takes them. make(tensors, config) gives the
    parameter; it has to work on the meta device too, where shapes are checked.
    """

    tensors: tuple[str, ...]
    make: Callable[[Sequence[torch.Tensor], Any], torch.Tensor]


TensorName = str | Made | tuple[str | Made, ...]
"""One place for a parameter, or several of which files have one."""


@dataclass(frozen=True)
class Architecture:
    """name: `general.architecture`. config: the transformers configuration as a dictionary with `model_type`.

    names: module or parameter of the model, inside a layer or outside of all, to tensor of the file, inside its block
    or outside of all; `.weight` and `.bias` are carried over from modules.
    """

    name: str
    config: Callable[[Facts], dict[str, Any]]
    names: Mapping[str, TensorName]
    ignored: tuple[str, ...] = field(default=())
    """Endings of further tensors that the model does not use."""


def decoder_config(facts: Facts, model_type: str, **more: Any) -> dict[str, Any]:
    """What all decoders have in common; `more` is added, or replaces it."""
    heads = facts.need("attention.head_count", least=1)
    hidden = facts.need("embedding_length", least=1)
    return {
        "model_type": model_type,
        "vocab_size": facts.vocabulary(),
        "hidden_size": hidden,
        "intermediate_size": facts.get("feed_forward_length"),
        "num_hidden_layers": facts.need("block_count", least=1),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.get("attention.head_count_kv", heads),
        "head_dim": facts.get("attention.key_length", facts.get("rope.dimension_count", hidden // heads)),
        "max_position_embeddings": facts.need("context_length"),
        "rms_norm_eps": facts.need("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(facts),
        # The output matrix is left out where it is the embedding.
        "tie_word_embeddings": not facts.has("output.weight"),
        "bos_token_id": facts.token("bos"),
        "eos_token_id": facts.token("eos"),
        "pad_token_id": facts.token("padding"),
        **more,
    }


def softmax_router(facts: Facts) -> None:
    """Notes a problem where a file says that its router is another than a softmax whose weights are not scaled."""
    facts.only("expert_gating_func", SOFTMAX)
    facts.only("expert_weights_scale", 1.0)


def rope_parameters(facts: Facts, **more: Any) -> dict[str, Any]:
    """transformers' `rope_parameters`. Raises nothing: a scaling that is not known is noted as a problem."""
    base = {"rope_theta": facts.get("rope.freq_base", 10000.0), **more}
    factors = facts.floats("rope_freqs.weight")
    if factors is not None:
        # Llama 3.1's scaling, stored as what each frequency is divided by. transformers' "longrope" does just that; its
        # own other effects are switched off.
        return {
            **base,
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "factor": 1.0,
            "original_max_position_embeddings": facts.need("context_length"),
        }
    kind = facts.get("rope.scaling.type", "none")
    factor = facts.get("rope.scaling.factor", facts.get("rope.scale_linear"))  # the latter in files of 2023
    if kind == "none" and factor is not None and factor != 1.0:
        kind = "linear"
    if kind == "none":
        return {**base, "rope_type": "default"}
    if kind == "linear":
        return {**base, "rope_type": "linear", "factor": factor or 1.0}
    if kind == "yarn":
        return {**base, **_yarn(facts, factor)}
    facts.problems.append(f"rope scaling {kind!r} is not read; scalings: none, linear, yarn")
    return {**base, "rope_type": "default"}


def _yarn(facts: Facts, factor: float | None) -> dict[str, Any]:
    facts.only("rope.scaling.attn_factor", 1.0)
    facts.only("rope.scaling.yarn_ext_factor", 1.0)
    rope = {
        "rope_type": "yarn",
        "factor": facts.need("rope.scaling.factor") if factor is None else factor,
        "original_max_position_embeddings": facts.need("rope.scaling.original_context_length"),
        # 32 and 1 are llama.cpp's defaults as they are transformers'.
        "beta_fast": facts.get("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": facts.get("rope.scaling.yarn_beta_slow", 1.0),
    }
    attention = facts.get("rope.scaling.yarn_attn_factor")
    return rope if attention is None else {**rope, "attention_factor": attention}
