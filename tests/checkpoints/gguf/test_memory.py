"""Memory that loading takes, in a process of its own."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoints.gguf.writer import Wish, write_gguf
from tests.models import make_qwen3_moe

_MIB = 1 << 20
_LAYERS, _EXPERTS, _SIZE = 10, 64, 256

_LOAD = """
import json, sys
import torch
from ktransformers import KTransformer

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

KTransformer.from_pretrained(sys.argv[1], rules="auto")  # what is loaded once: libraries, threads
before = status("VmRSS")
model = KTransformer.from_pretrained(sys.argv[2], rules="auto")
packed = sum(int(entry.details["bytes"]) for entry in model.report.replacements)
print(json.dumps({"grown": status("VmHWM") - before, "packed": packed}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_experts_are_never_in_memory_as_floats(tmp_path: Path) -> None:
    sizes = {"hidden_size": _SIZE, "moe_intermediate_size": _SIZE, "num_experts": _EXPERTS, "num_attention_heads": 4}
    small = make_qwen3_moe(mlp_only_layers=[], **{**sizes, "num_experts": 2}, num_hidden_layers=1)
    config = copy.deepcopy(small.config)
    config.update({"num_experts": _EXPERTS, "num_hidden_layers": _LAYERS, "layer_types": None})
    with torch.device("meta"):
        empty = type(small)(config)
    large = empty.to_empty(device="cpu")  # the writer makes blocks of IQ4_XS up; nothing is computed with the rest
    write_gguf(small, tmp_path / "small.gguf", Wish(types={"": "IQ4_XS"}))
    write_gguf(large, tmp_path / "large.gguf", Wish(types={"": "IQ4_XS"}))
    del large
    run = subprocess.run(
        [sys.executable, "-c", _LOAD, str(tmp_path / "small.gguf"), str(tmp_path / "large.gguf")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    measured = json.loads(run.stdout)
    a_layer = 3 * _EXPERTS * _SIZE * _SIZE * 2  # bf16
    assert measured["grown"] < measured["packed"] + 2 * a_layer + 64 * _MIB
    assert _LAYERS * a_layer > 2 * a_layer + 128 * _MIB  # or the bound would hold for the whole model as floats
