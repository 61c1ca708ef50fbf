"""One MoE layer in this project and in its peers, interleaved in one run.

    python benchmarks/peers.py [--shape 128,8,2048,768] [--tokens 1,16,512] [--rounds 7] [--threads N]
                               [--kt-kernel-python /path/to/python]

Each contestant lives in a process of its own, which holds the layer and times one call at a time when told to, so that
rounds alternate between contestants and a slow minute of the machine hits all of them. Whoever is not asked is stopped
(SIGSTOP): threads of some contestants spin for a while after a call and would take the next one's cores. kt-kernel's
Python package has the same name as ours: give the interpreter of an environment where `pip install kt-kernel` was run,
and its AVX2 and, where it loads, AMX classes take part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the peer's interpreter runs this file, too

from benchmarks.contestant import Contestant, answer, ready

Shape = tuple[int, int, int, int]
"""experts, top-k, hidden, intermediate"""

OURS = ("kt INT8", "kt INT4", "kt BF16")
TRANSFORMERS = ("transformers grouped_mm", "transformers batched_mm")
KT_KERNEL = ("kt-kernel AVX2BF16", "kt-kernel AMXBF16", "kt-kernel AMXInt8")

# batched_mm copies every chosen expert for every token: at more tokens than this it would run for minutes.
_BATCHED_MOST_TOKENS = 16


# ---- the contestants, each in its own process ------------------------------------------------------------------------


def _weights(shape: Shape) -> tuple[Any, Any]:
    import torch

    experts, _, hidden, intermediate = shape
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(experts, 2 * intermediate, hidden, generator=generator, dtype=torch.float32) / hidden**0.5
    down = torch.randn(experts, hidden, intermediate, generator=generator, dtype=torch.float32) / intermediate**0.5
    return gate_up.bfloat16(), down.bfloat16()


def _ours(name: str, shape: Shape, threads: int) -> Callable[[Any, Any, Any], Any]:
    import kt_kernel

    experts, top_k, hidden, intermediate = shape
    config = {
        "expert_num": experts,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_len": 2048,
        "num_experts_per_tok": top_k,
    }
    layer = kt_kernel.MoEWrapper(config, backend=name.split()[1], threads=threads)
    gate_up, down = _weights(shape)
    layer.load_weights({"gate_up_proj": gate_up, "down_proj": down})
    return layer.forward


def _transformers(name: str, shape: Shape, threads: int) -> Callable[[Any, Any, Any], Any]:
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    torch.set_num_threads(threads)
    experts, top_k, hidden, intermediate = shape
    config = Qwen3MoeConfig(
        num_experts=experts, num_experts_per_tok=top_k, hidden_size=hidden, moe_intermediate_size=intermediate
    )
    config._experts_implementation = name.split()[1]
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    gate_up, down = _weights(shape)
    module.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
    module.down_proj = torch.nn.Parameter(down, requires_grad=False)
    return lambda x, ids, weights: module(x, ids, weights.to(x.dtype))


def _kt_kernel(name: str, shape: Shape, threads: int) -> Callable[[Any, Any, Any], Any]:
    import torch

    from kt_kernel import kt_kernel_ext as ext  # type: ignore[attr-defined]  # the peer's, not ours

    experts, top_k, hidden, intermediate = shape
    pool = ext.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
    cpu = ext.CPUInfer(pool)
    gate_up, down = _weights(shape)
    keep = (gate_up[:, :intermediate].contiguous(), gate_up[:, intermediate:].contiguous(), down)
    config = ext.moe.MOEConfig(experts, top_k, hidden, intermediate, 0)
    config.max_len = 4096
    config.gate_proj, config.up_proj, config.down_proj = (tensor.data_ptr() for tensor in keep)
    config.gate_scale = config.up_scale = config.down_scale = 0
    config.pool = cpu.backend_
    mapping = torch.arange(experts, dtype=torch.int64)
    moe = getattr(ext.moe, name.split()[1] + "_MOE")(config)
    cpu.submit(moe.load_weights_task(mapping.data_ptr()))
    cpu.sync()

    def forward(x: Any, ids: Any, weights: Any) -> Any:
        out, count = torch.empty_like(x), torch.tensor([x.shape[0]], dtype=torch.int32)
        task = moe.forward_task(
            count.data_ptr(), top_k, ids.data_ptr(), weights.data_ptr(), x.data_ptr(), out.data_ptr(), False
        )
        cpu.submit(task)
        cpu.sync()
        return out

    forward.keep = keep  # type: ignore[attr-defined]  # the kernel reads these tensors' memory
    return forward


def _serve(name: str, shape: Shape, threads: int) -> None:
    """Answers `{"tokens": T, "seed": s}` lines with `{"seconds": …, "output": [...]}` lines."""
    import torch

    build = _ours if name in OURS else _transformers if name in TRANSFORMERS else _kt_kernel
    forward = build(name, shape, threads)
    experts, top_k, hidden, _ = shape
    ready()
    for line in sys.stdin:
        ask = json.loads(line)
        generator = torch.Generator().manual_seed(ask["seed"])
        seconds = 0.0
        with torch.inference_mode():
            for _ in range(ask["calls"]):
                x = torch.randn(ask["tokens"], hidden, generator=generator).bfloat16()
                ids = torch.rand(ask["tokens"], experts, generator=generator).argsort(-1)[:, :top_k].contiguous()
                weights = torch.softmax(torch.rand(ask["tokens"], top_k, generator=generator), -1)
                start = time.perf_counter()
                y = forward(x, ids, weights)
                seconds += time.perf_counter() - start
        answer({"seconds": seconds / ask["calls"], "output": y[-1, :64].float().tolist()})


# ---- the referee -----------------------------------------------------------------------------------------------------


@contextmanager
def _field(names: dict[str, str], arguments: list[str]) -> Iterator[list[Contestant]]:
    contestants: list[Contestant] = []
    try:
        for name, python in names.items():
            try:
                command = [python, str(Path(__file__).resolve()), "--worker", name, *arguments]
                contestants.append(Contestant(name, command))
            except RuntimeError as error:
                sys.stderr.write(f"left out: {error}\n")
        yield contestants
    finally:
        for contestant in contestants:
            contestant.close()


def _relative_error(a: list[float], b: list[float]) -> float:
    difference = sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5
    return float(difference / sum(y * y for y in b) ** 0.5)


def _compete(contestants: list[Contestant], tokens: int, rounds: int) -> dict[str, float]:
    calls = max(1, 16 // tokens)
    errors: dict[str, float] = {}
    reference: list[float] = []
    for round_number in range(rounds + 1):  # the first warms up and checks the results
        for contestant in contestants:
            if contestant.name.endswith("batched_mm") and tokens > _BATCHED_MOST_TOKENS:
                continue
            told = contestant.ask({"tokens": tokens, "calls": calls, "seed": round_number})
            if round_number == 0:
                reference = reference or told["output"]
                errors[contestant.name] = _relative_error(told["output"], reference)
            else:
                contestant.times.setdefault(tokens, []).append(told["seconds"])
    return errors


def _print_table(contestants: list[Contestant], shape: Shape, tokens: int, errors: dict[str, float]) -> None:
    experts, top_k, hidden, intermediate = shape
    medians = {c.name: statistics.median(c.times[tokens]) for c in contestants if tokens in c.times}
    fastest_peer = min((t for name, t in medians.items() if name not in OURS), default=float("nan"))
    sys.stdout.write(f"\nE={experts} k={top_k} H={hidden} I={intermediate}, {tokens} token(s)\n")
    sys.stdout.write(f"{'':26}{'ms':>10}{'GOP/s':>9}{'x best peer':>13}{'differs':>9}\n")
    for name, seconds in sorted(medians.items(), key=lambda item: item[1]):
        operations = 6 * tokens * top_k * hidden * intermediate / seconds / 1e9
        ratio = fastest_peer / seconds
        sys.stdout.write(f"{name:26}{seconds * 1e3:10.2f}{operations:9.1f}{ratio:13.2f}{errors[name]:9.2%}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="128,8,2048,768", help="experts,top-k,hidden,intermediate")
    parser.add_argument("--tokens", default="1,16,512")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as the kernel takes by default")
    parser.add_argument("--kt-kernel-python", help="interpreter of an environment with kt-kernel")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    experts, top_k, hidden, intermediate = (int(part) for part in options.shape.split(","))
    shape = (experts, top_k, hidden, intermediate)
    if options.worker:
        _serve(options.worker, shape, options.threads)
        return
    if options.threads == 0:
        import kt_kernel

        options.threads = kt_kernel.cpu_info().threads.default
    names = dict.fromkeys(OURS + TRANSFORMERS, sys.executable)
    if options.kt_kernel_python:
        names |= dict.fromkeys(KT_KERNEL, options.kt_kernel_python)
    with _field(names, ["--shape", options.shape, "--threads", str(options.threads)]) as contestants:
        for tokens in (int(part) for part in options.tokens.split(",")):
            errors = _compete(contestants, tokens, options.rounds)
            _print_table(contestants, shape, tokens, errors)


if __name__ == "__main__":
    main()
