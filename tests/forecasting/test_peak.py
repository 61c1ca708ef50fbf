"""A forecast against the real peak of a process that loads a model of some hundred megabytes and writes with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig

from ktransformers.injection import build_meta_model

_EXPERTS = 32

_SCRIPT = r"""
import sys, torch
from ktransformers import KTransformer, forecast

folder = sys.argv[1]
kwargs = {"backend": "INT8", "threads": 2}
rules = [{"match": {"name": "experts$"}, "replace": {"class": "KTransformersExperts", "kwargs": kwargs}}]
foretold = forecast(folder, rules, context=72)
model = KTransformer.from_pretrained(folder, rules=rules).model
with torch.no_grad():
    model.generate(torch.arange(64)[None], max_new_tokens=8, do_sample=False, pad_token_id=0)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(foretold.peak, int(peak.split()[1]) << 10)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """360 MB of experts in bf16, one tensor for each expert's projection, and 60 MB of everything else."""
    config = Qwen3MoeConfig(
        num_hidden_layers=10,
        hidden_size=512,
        moe_intermediate_size=384,
        num_experts=_EXPERTS,
        num_experts_per_tok=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=24000,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    noise = (torch.randn(24000 * 512, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    tensors = {}
    for name, parameter in build_meta_model(config).named_parameters():
        path, _, leaf = name.rpartition(".")
        if not path.endswith("experts"):
            tensors[name] = noise[: parameter.numel()].view(parameter.shape).clone()
            continue
        for expert in range(_EXPERTS):
            for projection in leaf.replace("gate_up", "gate up").removesuffix("_proj").split():
                shape = (512, 384) if projection == "down" else (384, 512)
                tensors[f"{path}.{expert}.{projection}_proj.weight"] = noise[: 384 * 512].view(shape).clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from Linux's /proc")
def test_the_real_peak_is_within_a_tenth_of_what_was_foretold(folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", _SCRIPT, str(folder)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    foretold, real = map(int, run.stdout.split()[-2:])
    assert abs(foretold - real) < 0.1 * real, f"{foretold >> 20} MiB foretold, {real >> 20} MiB real"
