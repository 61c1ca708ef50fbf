"""A checkpoint of three layers of experts for the tests of converting, and the wrapper that loads one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kt_kernel import MoEWrapper
from tests.kernel.layers import make_input, make_layer

LAYERS = [make_layer(4, 40, 24, seed=seed) for seed in range(3)]
X, IDS, WEIGHTS = make_input(LAYERS[0], 5, 2)
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
PREFIXES = [f"model.layers.{index}.block_sparse_moe.experts" for index in range(3)]
FILES = [f"{prefix}.safetensors" for prefix in PREFIXES]


def make_mixtral(folder: Path) -> Path:
    """Three layers of bf16 experts under Mixtral's names, in two files, and what else a checkpoint has."""
    tensors = {"model.embed_tokens.weight": torch.zeros(8, 40)}
    for prefix, layer in zip(PREFIXES, LAYERS, strict=True):
        for name, stacked in layer.weights().items():
            for expert in range(layer.experts):
                tensors[f"{prefix}.{expert}.{MIXTRAL[name]}.weight"] = torch.from_numpy(stacked[expert]).bfloat16()
    folder.mkdir(parents=True)
    names = list(tensors)
    save_file({name: tensors[name] for name in names[::2]}, folder / "model-1.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, folder / "model-2.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 40, "model_type": "mixtral"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def make_wrapper(backend: str = "INT8", **options: Any) -> MoEWrapper:
    return MoEWrapper(LAYERS[0].config(2), backend=backend, threads=1, **options)
