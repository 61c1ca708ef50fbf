"""Linears on the kernel and in torch's bf16, in a model whose experts are on the kernel and alone, in one run.

    python benchmarks/linears.py [--tokens 1,256] [--rounds 15] [--threads 1]

The model is a Qwen3-MoE of random bf16 weights, about 400 MB: small enough for any machine, and its matrices are of the
size of a real model's. One token is a decode step with 64 tokens in the cache; more are a prompt. Rounds alternate
between the contestants, so that a slow minute of the machine hits all of them. On one thread, the default, what counts
is the processor time that the thread was given, and of that the fastest round: a busy machine changes it least. On
more threads it is the clock's.
"""

from __future__ import annotations

import os

# Before torch is imported: its idle threads would take the cores that the kernel works on.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import copy
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import ktransformers
from kt_kernel import LinearWrapper
from ktransformers.rules import RuleSet, load_rules

SIZES: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
    "max_position_embeddings": 4096,
}
CONTEXT = 64
LAYERS = ((1024, 1024), (2048, 4096), (1024, 32768))
# What every contestant's experts run on, and what its linears do.
CONTESTANTS = {"torch bf16": ("BF16", None), "kernel BF16": ("BF16", "BF16"), "kernel INT8": ("BF16", "INT8")}


Call = Callable[[], Any]


def main() -> None:
    """Prints one row for each contestant: its fastest round, and how many times faster than torch's that is."""
    options = _options()
    torch.set_num_threads(options.threads)
    models = _contestants(options.threads)
    sys.stdout.write(f"{options.threads} threads, {options.rounds} rounds\n")
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    for tokens in options.tokens:
        _show(f"model, {tokens} tokens", _measure(_model_calls(models, tokens), clock, options.rounds))
    for inputs, channels in LAYERS:
        for rows in (1, 16, 256):
            calls = _layer_calls(inputs, channels, rows, options.threads)
            _show(f"{inputs} to {channels}, {rows} rows", _measure(calls, clock, options.rounds))


def _show(what: str, times: dict[str, list[float]]) -> None:
    for name, seconds in times.items():
        ratio = min(times["torch bf16"]) / min(seconds)
        sys.stdout.write(f"{what:24s} {name:12s} {min(seconds) * 1e3:9.3f} ms  {ratio:5.2f} x\n")


def _contestants(threads: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).eval().bfloat16()
    made = {}
    for name, (experts, linears) in CONTESTANTS.items():
        twin = copy.deepcopy(model)
        ktransformers.inject(twin, _rules(experts, linears), keep_float=False, threads=threads)
        made[name] = twin
    return made


def _rules(experts: str, linears: str | None) -> RuleSet:
    """cpu-only.yaml with these backends; without its rule for linears where they stay in torch."""
    rules = load_rules("cpu-only")
    first, second = (
        replace(rule, kwargs={**rule.kwargs, "backend": backend})
        for rule, backend in zip(rules, (experts, linears), strict=True)
    )
    return replace(rules, rules=(first,) if linears is None else (first, second))


def _model_calls(models: dict[str, Any], tokens: int) -> dict[str, Call]:
    ids = torch.randint(0, SIZES["vocab_size"], (1, tokens))
    with torch.inference_mode():
        caches = {name: _cache(model(torch.arange(CONTEXT)[None])) for name, model in models.items()}

    def call(name: str) -> None:
        cache = caches[name] if tokens == 1 else None
        models[name](ids, cache=cache, logits_to_keep=1)
        if cache is not None:
            cache.crop(CONTEXT)

    return {name: partial(call, name) for name in models}


def _cache(output: Any) -> Any:
    """Newer versions of transformers call it `cache`."""
    return getattr(output, "cache", None) or output.past_key_values


def _layer_calls(inputs: int, channels: int, rows: int, threads: int) -> dict[str, Call]:
    layer = torch.nn.Linear(inputs, channels, bias=False, dtype=torch.bfloat16)
    x = torch.randn(rows, inputs).bfloat16()
    calls: dict[str, Call] = {"torch bf16": partial(layer, x)}
    for backend in ("BF16", "INT8"):
        wrapper = LinearWrapper(inputs, channels, backend=backend, threads=threads)
        wrapper.load_weights(layer.weight)
        calls[f"kernel {backend}"] = partial(wrapper.forward, x)
    return calls


def _measure(calls: dict[str, Call], clock: Callable[[], float], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for turn in range(rounds + 1):
            for name, call in calls.items():
                start = clock()
                call()
                if turn > 0:  # the first one warms up
                    times[name].append(clock() - start)
    return times


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[1, 256])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
