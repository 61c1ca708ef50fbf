from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kt_kernel import _ext, cpu_info
from tests.kernel.layers import TIERS


def _run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
    return done.stdout


def test_the_report_tells_compiled_possible_and_chosen_tiers() -> None:
    info = cpu_info()
    assert [row.name for row in info.tiers if row.usable] == TIERS
    assert info.tiers[0].name == "generic"
    assert set(info.chosen) == {"INT8", "BF16"}
    for row in info.tiers:
        assert bool(row.why_not) != row.usable
    assert info.features == _ext.cpu_features()


def test_the_report_names_the_variable_that_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUINFER_ENABLE_AVX2", "OFF")
    info = cpu_info()
    assert info.chosen == {"INT8": "generic", "BF16": "generic"}
    assert all("CPUINFER_ENABLE_AVX2=OFF" in row.why_not and row.capped for row in info.tiers[1:])
    assert "CPUINFER_ENABLE_AVX2=OFF" in str(info)


def test_the_report_is_plain_data_for_json() -> None:
    plain = json.loads(json.dumps(cpu_info().as_dict()))
    assert plain["tiers"][0]["name"] == "generic"
    assert plain["threads"]["default"] >= 1
    assert set(plain["chosen"]) == {"INT8", "BF16"}


def test_the_text_has_a_row_for_each_tier_and_the_thread_limits() -> None:
    text = str(cpu_info())
    assert all(any(line.startswith(row.name) for line in text.splitlines()) for row in cpu_info().tiers)
    assert "physical cores" in text
    assert "cgroup quota" in text


def test_thread_default_obeys_the_environment_and_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_info().threads.default == _ext.topology().default_threads
    monkeypatch.setenv("KT_NUM_THREADS", "7")
    threads = cpu_info().threads
    assert (threads.default, threads.limited_by) == (7, "KT_NUM_THREADS")


def test_affinity_mask_bounds_the_default() -> None:
    cpu = min(os.sched_getaffinity(0))
    program = (
        f"import os; os.sched_setaffinity(0, {{{cpu}}}); import kt_kernel; print(kt_kernel.cpu_info().threads.default)"
    )
    assert _run(program).strip() == "1"


def test_import_brings_neither_torch_nor_safetensors() -> None:
    program = (
        "import sys, kt_kernel; kt_kernel.cpu_info(); print([m for m in ('torch', 'safetensors') if m in sys.modules])"
    )
    assert _run(program).strip() == "[]"


_REFUSE_ARCH_PRCTL = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
ARCH_PRCTL, EPERM = 158, 1
filter = struct.pack("=HBBI", 0x20, 0, 0, 0)                          # load the system call's number
filter += struct.pack("=HBBI", 0x15, 0, 1, ARCH_PRCTL)                # another one: skip the next line
filter += struct.pack("=HBBI", 0x06, 0, 0, 0x00050000 | EPERM)        # refuse
filter += struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)                # allow
memory = ctypes.create_string_buffer(filter)
program = ctypes.create_string_buffer(struct.pack("@HP", 4, ctypes.addressof(memory)))
assert libc.prctl(38, 1, 0, 0, 0) == 0                                # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()      # PR_SET_SECCOMP
assert libc.syscall(ARCH_PRCTL, 0x1022, 0) == -1
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="arch_prctl is an x86-64 system call")
def test_a_sandbox_that_refuses_the_tile_permission_leaves_a_working_process() -> None:
    if subprocess.run([sys.executable, "-c", _REFUSE_ARCH_PRCTL], capture_output=True, check=False).returncode != 0:
        pytest.skip("this host does not allow seccomp filters")
    program = _REFUSE_ARCH_PRCTL + (
        "import numpy as np, kt_kernel\n"
        "assert not kt_kernel.cpu_info().features['os_amx']\n"
        "config = dict(expert_num=2, hidden_size=8, intermediate_size=8, max_len=4, num_experts_per_tok=1)\n"
        "moe = kt_kernel.AMXMoEWrapper(config)\n"
        "ones = np.ones((2, 8, 8), np.float32)\n"
        "moe.load_weights({'gate_proj': ones, 'up_proj': ones, 'down_proj': ones})\n"
        "y = moe.forward(np.ones((1, 8), np.float32), np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32))\n"
        "print(moe.tier, float(y[0, 0]))\n"
    )
    tier, value = _run(program).split()
    assert tier != "amx"
    assert float(value) == pytest.approx(8 * 64, rel=0.03)
