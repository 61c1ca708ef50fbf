"""How much memory loading takes at its peak, measured on a process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loading.synthetic import write_checkpoint

MIB = 1 << 20
# Interpreter, torch and transformers take about 340 MiB before anything is loaded.
OVERHEAD = 400 * MIB

_LOAD = """
import json, sys
import torch
from ktransformers import KTransformer
replace = {"class": "KTransformersExperts", "kwargs": {"backend": "INT4"}}
rules = [{"match": {"name": r"\\.experts$"}, "replace": replace}]
model = KTransformer.from_pretrained(sys.argv[1], rules=rules)
with torch.inference_mode():
    finite = bool(model.model(torch.arange(4).view(1, 4)).logits.isfinite().all())
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
packed = sum(int(entry.details["bytes"]) for entry in model.report.replacements)
print(json.dumps({"peak": int(status["VmHWM"].split()[0]) * 1024, "packed": packed, "finite": finite}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_experts_are_never_in_memory_as_floats_beyond_two_layers(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    try:
        sizes = write_checkpoint(folder, layers=32, intermediate=640)
        run = subprocess.run(
            [sys.executable, "-c", _LOAD, str(folder)], capture_output=True, text=True, timeout=400, check=True
        )
    finally:
        shutil.rmtree(folder)
    told = json.loads(run.stdout)
    assert told["finite"]
    bound = sizes["rest"] + told["packed"] + 2 * sizes["layer"] + OVERHEAD
    assert sizes["experts"] > 3 * bound  # the floats alone would not fit
    assert told["peak"] <= bound, f"{told['peak'] / MIB:.0f} MiB, at most {bound / MIB:.0f}"
