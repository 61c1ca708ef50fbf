"""MoE experts on CPUs: quantised, packed, and run on whatever instruction set this machine has.

Importing it needs neither torch nor a particular CPU::

    from kt_kernel import MoEWrapper, cpu_info

    print(cpu_info())
    moe = MoEWrapper(config, backend="INT8")
    moe.load_weights({"gate_proj": gate, "up_proj": up, "down_proj": down})
    y = moe.forward(x, expert_ids, weights)
"""

from __future__ import annotations

from kt_kernel import _ext
from kt_kernel._versions import check_extension

__version__ = check_extension(_ext, __file__)

from kt_kernel.backends import BACKENDS, Backend, parse_backend
from kt_kernel.bandwidth import read_bandwidth
from kt_kernel.calls import Pending
from kt_kernel.config import MoEConfig
from kt_kernel.cpu_info import CpuInfo, cpu_info
from kt_kernel.errors import (
    BackendError,
    ConfigError,
    ForkError,
    InputError,
    KernelError,
    NotLoadedError,
    UnsupportedCpuError,
    WeightsError,
)
from kt_kernel.gate import GateFormula
from kt_kernel.linear import LinearWrapper
from kt_kernel.wrappers import AMXMoEWrapper, AVX2MoEWrapper, MoEWrapper

__all__ = [
    "BACKENDS",
    "AMXMoEWrapper",
    "AVX2MoEWrapper",
    "Backend",
    "BackendError",
    "ConfigError",
    "CpuInfo",
    "ForkError",
    "GateFormula",
    "InputError",
    "KernelError",
    "LinearWrapper",
    "MoEConfig",
    "MoEWrapper",
    "NotLoadedError",
    "Pending",
    "UnsupportedCpuError",
    "WeightsError",
    "__version__",
    "cpu_info",
    "parse_backend",
    "read_bandwidth",
]
