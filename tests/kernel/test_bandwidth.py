"""The probe of memory, and what a layer will take before it is there."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

import kt_kernel
from kt_kernel import MoEWrapper, _ext

_CONFIG = {"expert_num": 3, "hidden_size": 72, "intermediate_size": 40, "max_len": 16, "num_experts_per_tok": 2}


def test_a_small_container_is_probed_with_an_eighth_of_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 << 20))
    rate = kt_kernel.read_bandwidth(threads=2)
    assert math.isfinite(rate)
    assert rate > 0


def test_an_impossible_number_of_threads_is_refused() -> None:
    with pytest.raises(kt_kernel.ConfigError, match="threads is 0"):
        kt_kernel.read_bandwidth(threads=0)


def test_fewer_bytes_than_a_page_for_each_thread_are_refused() -> None:
    with pytest.raises(_ext.KernelError, match="less than a page"):
        _ext.Context(2).read_bandwidth(4096)


@pytest.mark.parametrize("backend", ["INT8", "BF16"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_the_bytes_of_an_expert_are_known_before_it_is_packed(backend: str, biased: bool, gated: bool) -> None:
    gate = kt_kernel.GateFormula(gated=gated, activation="silu" if gated else "relu2")
    moe = MoEWrapper(_CONFIG, backend=backend, threads=1, gate=gate)
    foreseen = moe.expert_bytes(biased=biased)
    assert not moe.loaded
    weights = {"up_proj": np.ones((3, 40, 72), np.float32), "down_proj": np.ones((3, 72, 40), np.float32)}
    if gated:
        weights["gate_proj"] = weights["up_proj"]
    if biased:
        weights |= {f"{name}_bias": np.ones(w.shape[:2], np.float32) for name, w in weights.items()}
    moe.load_weights(weights)
    assert moe.nbytes == 3 * foreseen
    assert moe.bytes_per_token == 2 * foreseen
