"""How long a model takes from its files to its first token, against transformers.

    python benchmarks/loading.py [--billions 1.3] [--rounds 3] [--folder FOLDER] [--backends INT8,INT4,BF16]
                                 [--gguf MODEL.gguf] [--llama-completion /path/to/llama-completion]

Makes a Qwen3-MoE of random bf16 weights. Every start is a process of its own, and starts alternate, so that a slow
minute of the machine hits all of them. The checkpoint was just written, and lies in the page cache where memory is
large enough: what is measured is work, not the disk. Seconds are counted from the call that loads to the end of a
forward of one token, after the imports at the script's top; the peak is that of the whole process. With `--gguf` that
file takes the checkpoint's place, and llama.cpp takes part: there the seconds are of the whole process, which generates
one token.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

HIDDEN, INTERMEDIATE, EXPERTS = 2048, 768, 64  # a layer of Qwen3-30B-A3B with half of its experts: 604 MB in bf16
_LAYER = 3 * EXPERTS * HIDDEN * INTERMEDIATE

_START = """
import json, sys, time
import torch
from pathlib import Path
from transformers import AutoModelForCausalLM
import ktransformers
ktransformers.KTransformer, ktransformers.KTransformersConfig
folder, backend, cache = sys.argv[1:]
started = time.perf_counter()
if backend == "transformers":
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
else:
    rule = {"class": "KTransformersExperts", "kwargs": {"backend": backend}}
    rules = [{"match": {"name": r"\\.experts$"}, "replace": rule}]
    model = ktransformers.KTransformer.from_pretrained(folder, rules=rules, cache=cache or False).model
with torch.inference_mode():
    model(torch.tensor([[1]]))
seconds = time.perf_counter() - started
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({"seconds": seconds, "peak": int(status["VmHWM"].split()[0]) * 1024}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--billions", type=float, default=1.3, help="parameters, in whole layers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for the checkpoint and the caches; default: a temporary one")
    parser.add_argument("--backends", default="INT8,INT4,BF16")
    parser.add_argument("--gguf", type=Path, help="a model to load in the place of a checkpoint; backend auto")
    parser.add_argument("--llama-completion", type=Path, help="llama.cpp's program, which loads the GGUF file, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="kt-loading-") as name:
        if options.gguf is not None:
            rows = measure_gguf(options.gguf, Path(name), options.llama_completion, options.rounds)
        else:
            checkpoint = make_checkpoint(Path(name) / "checkpoint", max(1, round(options.billions * 1e9 / _LAYER)))
            rows = measure(checkpoint, Path(name), options.backends.split(","), options.rounds)
    sys.stdout.write(table(rows) + "\n")


def make_checkpoint(folder: Path, layers: int) -> Path:
    """One shard a layer, experts one by one."""
    sizes: dict[str, Any] = {
        "vocab_size": 32768,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "dtype": "bfloat16",
        "architectures": ["Qwen3MoeForCausalLM"],
    }
    config = Qwen3MoeConfig(**sizes)
    config.save_pretrained(folder)
    with torch.device("meta"):
        state = Qwen3MoeForCausalLM(config).state_dict()
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        weight = (torch.randn(tensor.shape) * 0.03).to(torch.bfloat16)
        before, _, projection = key.rpartition(".experts.")
        shard = shards.setdefault(before.split(".")[2] if before else "rest", {})
        shard.update(_single(before, projection, weight) if before else {key: weight})
    index = {}
    for number, tensors in shards.items():
        file = f"model-{number}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def _single(before: str, projection: str, stacked: torch.Tensor) -> dict[str, torch.Tensor]:
    names = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
    return {
        f"{before}.experts.{expert}.{name}.weight": part.clone()
        for expert, matrix in enumerate(stacked)
        for name, part in zip(names, matrix.chunk(len(names)), strict=True)
    }


def measure(checkpoint: Path, folder: Path, backends: list[str], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """By contestant, what each of its starts took."""
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):
        found.setdefault("transformers, bf16", []).append(_start(checkpoint, "transformers", None))
        for backend in backends:
            _three_starts(checkpoint, backend, folder, found)
    return found


def measure_gguf(file: Path, folder: Path, llama: Path | None, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """As `measure`, of a GGUF file."""
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):
        if llama is not None:
            found.setdefault("llama.cpp", []).append(_llama(llama, file))
        _three_starts(file, "auto", folder, found)
    return found


def _three_starts(model: Path, backend: str, folder: Path, found: dict[str, list[dict[str, Any]]]) -> None:
    cache = folder / f"cache-{backend}"
    shutil.rmtree(cache, ignore_errors=True)
    found.setdefault(f"{backend}, without the cache", []).append(_start(model, backend, None))
    found.setdefault(f"{backend}, first start with it", []).append(_start(model, backend, cache))
    found.setdefault(f"{backend}, second start", []).append(_start(model, backend, cache))


def _llama(program: Path, file: Path) -> dict[str, Any]:
    started = time.perf_counter()
    flags = ["-p", "a", "-n", "1", "-no-cnv", "--no-warmup"]
    run = subprocess.Popen([program, "-m", file, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(run.pid, 0)
    seconds = time.perf_counter() - started
    if status != 0:
        raise SystemExit(f"{program} did not load: status {status}")
    return {"seconds": seconds, "peak": used.ru_maxrss * 1024}


def _start(checkpoint: Path, backend: str, cache: Path | None) -> dict[str, Any]:
    arguments = [sys.executable, "-c", _START, str(checkpoint), backend, str(cache or "")]
    run = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise SystemExit(f"{backend} did not load: {run.stderr}")
    told: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return told


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: medians of seconds, and the highest peak."""
    lines = ["| start | seconds | peak memory |", "|---|---|---|"]
    for name, starts in rows.items():
        seconds = statistics.median(start["seconds"] for start in starts)
        peak = max(start["peak"] for start in starts) / 2**30
        lines.append(f"| {name} | {seconds:.1f} | {peak:.2f} GiB |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
