"""A large Qwen3-MoE checkpoint that is made in a second: one tile of random numbers, over and over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

HIDDEN, EXPERTS = 1024, 16


def write_checkpoint(folder: Path, *, layers: int, intermediate: int = 320, shards: int = 3) -> dict[str, int]:
    """Writes fp32 shards and their index. Even layers have a tensor for each expert and projection, odd ones stacks.

    Returns bytes: of the experts, of one layer's, and of the rest.
    """
    folder.mkdir()
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=HIDDEN,
        intermediate_size=512,
        moe_intermediate_size=intermediate,
        num_experts=EXPERTS,
        num_experts_per_tok=4,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        dtype="float32",
        architectures=["Qwen3MoeForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        state = Qwen3MoeForCausalLM(config).state_dict()
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in state.items():
        shapes.update(_on_disk(name, tuple(tensor.shape)))
    names = list(shapes)
    index = {}
    for shard in range(shards):
        file = f"model-{shard}.safetensors"
        inside = names[shard::shards]  # no shard holds a layer whole
        index.update(dict.fromkeys(inside, file))
        _write(folder / file, {name: shapes[name] for name in inside})
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    experts = sum(tensor.nbytes for name, tensor in state.items() if ".experts." in name)
    rest = sum(tensor.nbytes for name, tensor in state.items() if ".experts." not in name)
    return {"experts": experts, "layer": experts // layers, "rest": rest}


def _on_disk(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    before, _, projection = name.rpartition(".experts.")
    if before and int(before.split(".")[2]) % 2 == 1:
        return {name: shape}
    if projection == "gate_up_proj":
        half = (shape[1] // 2, shape[2])
        return {f"{before}.experts.{e}.{p}_proj.weight": half for e in range(shape[0]) for p in ("gate", "up")}
    if projection == "down_proj":
        return {f"{before}.experts.{e}.down_proj.weight": shape[1:] for e in range(shape[0])}
    return {name: shape}


def _write(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    tile = (np.random.default_rng(0).standard_normal(1 << 20, np.float32) * 0.03).tobytes()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while end > 0:
            file.write(tile[:end])
            end -= len(tile)
