"""What a rule may write under `kwargs` of our operators: read, checked, and every problem told at once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch

import kt_kernel
from kt_kernel import environment
from kt_kernel.tier import choose_tier
from ktransformers.errors import DeviceError
from ktransformers.operators import devices

__all__ = ["ExpertsOptions", "LinearOptions", "OperatorOptions", "devices_are_strict"]

_NOTHING = (None, "", "None", "none", "null")


@dataclass(frozen=True)
class OperatorOptions:
    """Keyword arguments that operators of ours share. `read` makes one from what a rule says."""

    CPU_OP: ClassVar[str]
    """The op that runs on the kernel."""
    TORCH_OP: ClassVar[str]
    """The op that computes with the float weights, on any device."""
    SYNONYMS: ClassVar[Mapping[str, str]] = {}
    NOT_HERE: ClassVar[Mapping[str, str]] = {}
    """Ops of upstream's that are refused, and why."""

    prefill_device: str | None = None
    prefill_op: str | None = None
    generate_device: str = "cpu"
    generate_op: str = ""
    out_device: str | None = None
    backend: str | None = None
    prefill_threshold: int = 0
    rotate: bool = True
    threads: int | None = None
    strict: bool = False

    @classmethod
    def read(cls, kwargs: Mapping[str, Any]) -> Self:
        """Normalises the spellings of nothing ("None", "", null) and of ops. Call `problems` first: values are not
        checked here.
        """
        optional = {"prefill_device", "prefill_op", "out_device", "backend", "threads"}
        given = {name: None if name in optional and value in _NOTHING else value for name, value in kwargs.items()}
        for name in ("generate_op", "prefill_op"):
            if isinstance(op := given.get(name), str):
                given[name] = cls.SYNONYMS.get(op, op)
        return cls(**{name: value for name, value in given.items() if value is not None})

    @classmethod
    def problems(cls, kwargs: Mapping[str, Any]) -> list[str]:
        """Sentences on everything that is wrong with `kwargs`."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in kwargs if name not in known]
        found = [_unknown_name(name, known) for name in unknown]
        options = cls.read({name: value for name, value in kwargs.items() if name in known})
        found += _op_problems(options) + _number_problems(options)
        # What devices and backends become depends on the environment: it has to be understood first.
        said = [row["problem"] for row in environment.describe() if row["problem"]]
        return found + (said or [*_device_problems(options), *_backend_problems(options)])

    @property
    def streams_prefill(self) -> bool:
        """Whether long prompts are asked to run on float weights at `prefill_device`."""
        return self.prefill_op == self.TORCH_OP and self.prefill_threshold > 0

    def prefill_place(self) -> torch.device | None:
        """The device that takes long prompts; None when the generate op does."""
        if not self.streams_prefill:
            return None
        place = devices.resolve(self.prefill_device or "cpu", strict=devices_are_strict(self))
        # Without the GPU that was asked for, streaming would only be a slower CPU path. A written "cpu" is meant.
        return None if place.fell_back else place.device

    @property
    def ops(self) -> tuple[str, str]:
        return self.CPU_OP, self.TORCH_OP


@dataclass(frozen=True)
class ExpertsOptions(OperatorOptions):
    """The keyword arguments of `KTransformersExperts`."""

    CPU_OP: ClassVar[str] = "KExpertsCPU"
    TORCH_OP: ClassVar[str] = "KExpertsTorch"
    NOT_HERE: ClassVar[Mapping[str, str]] = {
        "KExpertsMarlin": "needs a CUDA kernel that this package does not have",
        "KExpertsCPUW8A8": "reads W8A8 weights, which this package does not",
        "KSFTExpertsCPU": "is for fine-tuning",
    }

    generate_op: str = CPU_OP


@dataclass(frozen=True)
class LinearOptions(OperatorOptions):
    """The keyword arguments of `KTransformersLinear`."""

    CPU_OP: ClassVar[str] = "KLinearCPU"
    TORCH_OP: ClassVar[str] = "KLinearTorch"
    SYNONYMS: ClassVar[Mapping[str, str]] = {"KLinearCPUInfer": "KLinearCPU"}
    NOT_HERE: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("KLinearMarlin", "VLinearMarlin", "KLinearFP8", "KLinearQ8", "KLinearIPEXLLM", "KLinearTorchW8A8A2"),
        "needs a kernel of another device, which this package does not have",
    )

    generate_op: str = CPU_OP


def devices_are_strict(options: OperatorOptions) -> bool:
    """A missing device is an error by the rule's `strict` or by KT_STRICT_DEVICES."""
    return options.strict or bool(environment.STRICT_DEVICES.get())


def _unknown_name(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown kwarg {name!r}" + (f", did you mean {near[0]!r}?" if near else f": there are {', '.join(known)}")


def _backend_problems(options: OperatorOptions) -> list[str]:
    try:
        backend = kt_kernel.parse_backend(options.backend)
        if options.strict is True and options.generate_op == options.CPU_OP:
            choose_tier(backend, strict=True)
    except (kt_kernel.BackendError, kt_kernel.UnsupportedCpuError) as error:
        return [str(error)]
    return []


def _op_problems(options: OperatorOptions) -> list[str]:
    found = []
    ops = options.ops
    for name in ("generate_op", "prefill_op"):
        op = getattr(options, name)
        if op in ops or (op is None and name == "prefill_op"):
            continue
        if not isinstance(op, str):
            found.append(f"{name}: one of {', '.join(ops)}, not {op!r}")
            continue
        if op in options.NOT_HERE:
            found.append(f"{name}: {op} {options.NOT_HERE[op]}; there are {', '.join(ops)}")
            continue
        near = difflib.get_close_matches(op, ops, n=1, cutoff=0.5)
        meant = f" Did you mean {near[0]}?" if near else ""
        found.append(f"{name}: there is no op {op!r}.{meant} Supported: {', '.join(ops)}")
    return found


def _device_problems(options: OperatorOptions) -> list[str]:
    found = []
    for name in ("prefill_device", "generate_device", "out_device"):
        asked = getattr(options, name)
        if asked is None:
            continue
        try:
            device = devices.parse(asked)
            if name == "generate_device" and options.generate_op == options.CPU_OP and device.type != "cpu":
                found.append(f"generate_device: {options.CPU_OP} runs on the CPU, write cpu in place of {asked!r}")
            else:
                devices.resolve(device, strict=devices_are_strict(options))
        except DeviceError as error:
            found.append(f"{name}: {error}")
    return found


def _number_problems(options: OperatorOptions) -> list[str]:
    found = []
    if not _whole(options.prefill_threshold, 0):
        found.append(f"prefill_threshold: a number of tokens, 0 for never, not {options.prefill_threshold!r}")
    most = environment.MOST_THREADS
    if options.threads is not None and not (_whole(options.threads, 1) and options.threads <= most):
        found.append(f"threads: a whole number from 1 to {most}, not {options.threads!r}")
    found += [
        f"{name}: true or false, not {value!r}"
        for name in ("rotate", "strict")
        if not isinstance(value := getattr(options, name), bool)
    ]
    return found


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
