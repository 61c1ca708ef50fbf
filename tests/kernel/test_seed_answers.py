"""The answers that the published guides give to frequent questions, each held true."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kt_kernel import AMXMoEWrapper, AVX2MoEWrapper, MoEWrapper, _ext, parse_backend
from kt_kernel.tier import choose_tier, family_of
from tests.kernel.layers import TIER_FORMATS, Kernel, make_input, make_layer, relative_error, same_bits
from tests.kernel.test_tier import CASCADE_LAKE, HASWELL, SAPPHIRE_RAPIDS, SKYLAKE_X, _make_machine

ICE_LAKE = CASCADE_LAKE
COOPER_LAKE = CASCADE_LAKE | {"avx512_bf16"}
ZEN = HASWELL


# Does kt-kernel support runtime switching between AMX and AVX2? There: no, variables choose at import. Here: both.


def test_one_build_exports_both_wrappers_and_they_run_side_by_side() -> None:
    layer = make_layer(3, 64, 48)
    x, ids, weights = make_input(layer, 5, 2)
    outputs = []
    for wrapper in (AMXMoEWrapper, AVX2MoEWrapper):
        moe = wrapper(layer.config(2), threads=1)
        moe.load_weights(layer.weights())
        outputs.append(moe.forward(x, ids, weights))
    assert same_bits(*outputs)


@pytest.mark.parametrize("variable", ["CPUINFER_ENABLE_AMX", "CPUINFER_ENABLE_AVX512", "CPUINFER_ENABLE_AVX2"])
def test_the_variables_decide_which_kernels_are_active_from_import_on(variable: str) -> None:
    program = (
        f"import os; os.environ['{variable}'] = 'OFF'\n"
        "import kt_kernel\n"
        "from kt_kernel.tier import family_of\n"
        "config = dict(expert_num=1, hidden_size=8, intermediate_size=8, max_len=4, num_experts_per_tok=1)\n"
        "print(family_of(kt_kernel.AMXMoEWrapper(config).tier))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    ladder = ["generic", "avx2", "avx512", "amx"]
    switched_off = variable.rpartition("_")[2].lower()
    assert ladder.index(done.stdout.strip()) < ladder.index(switched_off)


# What is the minimum CPU generation required for each backend?


@pytest.mark.parametrize(
    ("flags", "family"),
    [
        (HASWELL, "avx2"),
        (ZEN, "avx2"),
        (SKYLAKE_X, "avx512"),
        (ICE_LAKE, "avx512"),
        (COOPER_LAKE, "avx512"),
        (SAPPHIRE_RAPIDS, "amx"),
    ],
    ids=["Haswell", "Zen", "Skylake-X", "Ice Lake", "Cooper Lake", "Sapphire Rapids"],
)
@pytest.mark.parametrize("backend", ["AMXINT8", "AMXBF16"])
def test_each_generation_runs_its_backend(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], family: str, backend: str
) -> None:
    _make_machine(monkeypatch, flags)
    assert family_of(choose_tier(parse_backend(backend)).tier) == family


# Are the numerical results identical across AMX, AVX512, and AVX2?


def test_int8_results_are_identical_and_bf16_results_agree_on_all_tiers() -> None:
    layer = make_layer(4, 192, 160)
    x, ids, weights = make_input(layer, 33, 2)
    outputs = {(tier, format): Kernel(layer, format, tier, top_k=2)(x, ids, weights) for tier, format in TIER_FORMATS}
    for (_, format), output in outputs.items():
        if format == "INT8":
            assert same_bits(output, outputs["generic", "INT8"])
        elif format == "BF16":
            # Sums in another order may round an intermediate value to the neighbouring bf16 number.
            assert relative_error(output, np.asarray(outputs["generic", "BF16"], np.float64)) <= 0.001


# What is the difference between AMXINT8 and AMXBF16 backends?


def test_int8_takes_half_the_memory_bf16_is_nearer_to_the_float_model_and_both_have_tiles() -> None:
    layer = make_layer(2, 256, 256)
    x, ids, weights = make_input(layer, 32, 2)
    expected = layer.reference(x, ids, weights)
    nbytes, error = {}, {}
    for backend in ("AMXINT8", "AMXBF16"):
        moe = AMXMoEWrapper(layer.config(2), backend=backend, threads=1)
        moe.load_weights(layer.weights())
        nbytes[backend], error[backend] = moe.nbytes, relative_error(moe.forward(x, ids, weights), expected)
    assert 0.5 <= nbytes["AMXINT8"] / nbytes["AMXBF16"] <= 0.55
    assert error["AMXBF16"] < error["AMXINT8"] / 2
    (amx,) = (tier for tier in _ext.tiers() if tier.name == "amx")
    assert not amx.compiled or {"INT8", "BF16"} <= set(amx.formats)


# How can I verify that AMX acceleration is actually active?


def test_the_log_names_the_tier_and_switching_amx_off_changes_what_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _make_machine(monkeypatch, SAPPHIRE_RAPIDS)
    assert choose_tier(parse_backend("AMXINT8")).tier == "amx"
    monkeypatch.setenv("CPUINFER_ENABLE_AMX", "OFF")
    assert choose_tier(parse_backend("AMXINT8")).tier == "avx512_vnni"
    (said,) = caplog.messages
    assert said.startswith("backend AMXINT8 requested, running INT8 on avx512_vnni: ")
    assert "CPUINFER_ENABLE_AMX" in said


def test_a_wrapper_describes_what_it_runs() -> None:
    moe = MoEWrapper(make_layer(1, 8, 8).config(1), backend="INT8", threads=1)
    assert moe.description.startswith(f"INT8 → INT8 on {moe.tier}, 1 thread")


# What happens if I configure AMX on a CPU that does not support it?


@pytest.mark.parametrize(("flags", "family"), [(HASWELL, "avx2"), (COOPER_LAKE, "avx512"), (set(), "generic")])
def test_amx_on_a_cpu_without_it_falls_back_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flags: set[str], family: str
) -> None:
    _make_machine(monkeypatch, flags)
    assert family_of(choose_tier(parse_backend("AMXINT8")).tier) == family
    assert "this CPU has no amx_tile" in caplog.text
