"""The two wrapper snippets as they were published, word for word. AMX runs on the tier this CPU has."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.kernel.layers import Layer, relative_error, same_bits

EXPERTS, HIDDEN, INTERMEDIATE = 8, 2048, 5120

AMX = """
# AMX path: requires Sapphire Rapids or newer

import os
os.environ["CPUINFER_ENABLE_AMX"] = "ON"

from kt_kernel import AMXMoEWrapper

config = {
    "expert_num": 8,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "max_len": 1024,
    "num_experts_per_tok": 2,
    "swiglu_alpha": 0.0,
    "swiglu_limit": 0.0,
}
moe = AMXMoEWrapper(config)
moe.load_weights("path/to/weights")
output = moe.forward(input_tensor, expert_ids, weights)
"""

AVX2 = """
# AVX2 path: fallback for Haswell+ CPUs

import os
os.environ["CPUINFER_ENABLE_AMX"] = "OFF"
os.environ["CPUINFER_ENABLE_AVX2"] = "ON"

from kt_kernel import AVX2MoEWrapper

config = {
    "expert_num": 8,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "max_len": 1024,
    "num_experts_per_tok": 2,
}
moe = AVX2MoEWrapper(config)
moe.load_weights("path/to/weights")
output = moe.forward(input_tensor, expert_ids, weights)
"""


def _make_matrix(experts: int, rows: int, columns: int) -> torch.Tensor:
    """Random enough, and quick to make: one random block, repeated with a sign for each expert and place."""
    generator = torch.Generator().manual_seed(rows)
    block = torch.randn(1, 64, columns, generator=generator)
    signs = torch.randint(0, 2, (experts, rows // 64, 1, 1), generator=generator) * 2.0 - 1.0
    matrix = (block * signs).reshape(experts, rows, columns) / columns**0.5
    half: torch.Tensor = matrix.bfloat16()
    return half


@pytest.fixture(scope="module")
def weights_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Layer]]:
    """Half a gigabyte of bf16 in path/to/weights, deleted afterwards."""
    root = tmp_path_factory.mktemp("snippets")
    folder = root / "path" / "to" / "weights"
    folder.mkdir(parents=True)
    tensors = {
        "gate_proj": _make_matrix(EXPERTS, INTERMEDIATE, HIDDEN),
        "up_proj": _make_matrix(EXPERTS, INTERMEDIATE, HIDDEN).flip(2),
        "down_proj": _make_matrix(EXPERTS, HIDDEN, INTERMEDIATE),
    }
    save_file(
        {f"model.layers.0.mlp.experts.{name}": tensor.contiguous() for name, tensor in tensors.items()},
        folder / "m.safetensors",
    )
    used = [0, 3, 7]
    gate, up, down = (tensor[used].float().numpy() for tensor in tensors.values())
    layer = Layer(gate, up, down)
    del tensors
    yield root, layer
    shutil.rmtree(root)


@pytest.mark.slow
def test_both_snippets_run_as_printed_and_agree_bit_for_bit(
    weights_folder: tuple[Path, Layer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root, layer = weights_folder
    monkeypatch.chdir(root)
    for variable in ("CPUINFER_ENABLE_AMX", "CPUINFER_ENABLE_AVX2"):
        monkeypatch.setenv(variable, "")  # the snippets set them; this puts them back afterwards
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 3], [7, 0], [3, 7]])
    routing = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.9, 0.1]])
    places = {0: 0, 3: 1, 7: 2}
    expected = layer.reference(x.numpy(), np.vectorize(places.__getitem__)(ids.numpy()), routing.numpy())
    outputs = []
    for snippet in (AMX, AVX2):
        names: dict[str, Any] = {"input_tensor": x, "expert_ids": ids, "weights": routing}
        exec(compile(snippet, "<snippet>", "exec"), names)
        outputs.append(names["output"].numpy())
        assert names["moe"].format == "INT8"
        if names["moe"].tier != "amx" and snippet is AMX:
            assert [text for text in caplog.messages if "backend AMXINT8 requested, running INT8 on" in text]
        # Rows of 2048 and 5120 have larger extremes to scale by than the small layers of the other tests.
        assert relative_error(outputs[-1], expected) <= 0.03
    assert same_bits(*outputs)
