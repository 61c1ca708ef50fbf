"""Tiny quantised checkpoints, each with a float one of the same meaning."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests import models
from tests.kernel import quantizers
from tests.kernel.quantizers import Grid, Stored

Encode = Callable[[np.ndarray], Stored]

CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    "gptq-8": {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True},
            }
        },
    },
}
ENCODERS: dict[str, Encode] = {
    "fp8": lambda weight: quantizers.fp8_of(weight, (128, 128)),
    "gptq": lambda weight: quantizers.gptq(Grid.of(weight, 32)),
    "gptq-8": lambda weight: quantizers.gptq(Grid.of(weight, 32, symmetric=True, bits=8), bits=8),
    "awq": lambda weight: quantizers.awq(Grid.of(weight, 32)),
    "compressed-tensors": lambda weight: quantizers.compressed(Grid.of(weight, 32, symmetric=True)),
}


def make_pair(
    folder: Path, method: str, build: Callable[..., Any] = models.make_qwen3_moe, **overrides: Any
) -> tuple[Path, Path]:
    """(quantised, float): every projection is quantised; embeddings, norms, routers and the head stay bf16."""
    plain = models.save_with_tokenizer(build(**overrides).to(torch.bfloat16), folder / "float")
    tensors = load_file(plain / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        encoded = ENCODERS[method](tensor.float().numpy())
        stem = name.removesuffix("weight")
        stored |= {stem + part: value.contiguous() for part, value in encoded.tensors.items()}
        tensors[name] = torch.from_numpy(encoded.meaning).to(torch.bfloat16)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    quantised = folder / method
    shutil.copytree(plain, quantised)
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    _say(quantised, CONFIGS[method])
    return quantised, plain


def make_mxfp4(folder: Path) -> Path:
    """A gpt-oss as it is downloaded: blocks and scales for all experts, gate and up in turns, biases."""
    path = models.save_with_tokenizer(models.make_gpt_oss(), folder)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, channels = tensors.pop(name).shape
        stored = [quantizers.mxfp4(channels, inputs, seed).tensors for seed in range(experts)]
        tensors |= {f"{name}_{part}": torch.stack([each[part] for each in stored]) for part in ("blocks", "scales")}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    _say(path, {"quant_method": "mxfp4"})
    return path


def _say(folder: Path, quantization_config: dict[str, Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": quantization_config}))
