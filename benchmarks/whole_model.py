"""One GGUF file here and in llama.cpp, alternating: tokens a second of a prompt and of decoding.

    python benchmarks/whole_model.py MODEL.gguf [--rules auto,cpu-only] [--llama-bench /path/to/llama-bench]
                                     [--prompt 512] [--generate 32] [--rounds 5] [--threads N]

Each of our rows is a process of its own that holds the model, computes when asked and is stopped otherwise. llama-bench
loads the file anew in every round; what it reports is without that. Both decode greedily behind an empty context.
"""

from __future__ import annotations

import os

# Before torch is imported: its idle threads would take the cores that the kernel works on.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.contestant import Contestant, answer, ready

PHASES = ("prompt", "generate")


def main() -> None:
    options = _options()
    if options.worker:
        _serve(options.model, options.worker, options.threads)
        return
    if options.threads == 0:
        import kt_kernel

        options.threads = kt_kernel.cpu_info().threads.default
    ours = [_contestant(options, rules) for rules in options.rules.split(",")]
    rows: dict[str, dict[str, list[float]]] = {}
    sizes = {phase: getattr(options, phase) for phase in PHASES}
    try:
        for round_number in range(options.rounds + 1):  # the first warms up
            found = {f"ours, {each.name}": each.ask(sizes) for each in ours}
            if options.llama_bench:
                found["llama.cpp"] = _llama_bench(options)
            if round_number == 0:
                continue
            for name, speeds in found.items():
                for phase in PHASES:
                    rows.setdefault(name, {}).setdefault(phase, []).append(speeds[phase])
    finally:
        for each in ours:
            each.close()
    sys.stdout.write(table(rows, sizes) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rules", default="auto,cpu-only")
    parser.add_argument("--llama-bench", help="the program; what follows a blank goes to it, such as '--repack 0'")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--generate", type=int, default=32, help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as the kernel takes by default")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def _contestant(options: argparse.Namespace, rules: str) -> Contestant:
    worker = [str(Path(__file__).resolve()), str(options.model), "--worker", rules, "--threads", str(options.threads)]
    return Contestant(rules, [sys.executable, *worker])


def _serve(path: Path, rules: str, threads: int) -> None:
    """Answers `{"prompt": P, "generate": G}` lines with tokens a second."""
    import torch

    from ktransformers import KTransformer

    torch.set_num_threads(threads)
    model: Any = KTransformer.from_pretrained(path, rules, threads=threads).model
    ready()
    for line in sys.stdin:
        asked = json.loads(line)
        prompt = torch.arange(asked["prompt"]).reshape(1, -1) % model.config.vocab_size
        with torch.inference_mode():
            seconds = {
                "prompt": _timed(partial(model, prompt, logits_to_keep=1)),
                "generate": _timed(partial(_decode, model, prompt[:, :1], asked["generate"])),
            }
        answer({phase: asked[phase] / seconds[phase] for phase in PHASES})


def _decode(model: Any, token: Any, tokens: int) -> None:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for _ in range(tokens):
        token = model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _llama_bench(options: argparse.Namespace) -> dict[str, float]:
    program, *more = options.llama_bench.split()
    sizes = ["-p", str(options.prompt), "-n", str(options.generate), "-t", str(options.threads)]
    command = [program, "-m", str(options.model), *sizes, "-r", "1", "-o", "json", *more]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise SystemExit(f"llama-bench ended with exit status {run.returncode}: {run.stderr[-500:]}")
    rows = json.loads(run.stdout)
    return {"prompt" if row["n_prompt"] else "generate": float(row["avg_ts"]) for row in rows}


def table(rows: dict[str, dict[str, list[float]]], sizes: dict[str, int]) -> str:
    """Markdown: medians."""
    lines = [f"| | prompt of {sizes['prompt']}, tokens/s | decoding {sizes['generate']}, tokens/s |", "|---|---|---|"]
    for name, speeds in rows.items():
        figures = (f"{statistics.median(speeds[phase]):.1f}" for phase in PHASES)
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
