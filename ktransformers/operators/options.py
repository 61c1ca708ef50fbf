"""What a rule may write under `kwargs` of KTransformersExperts: read, checked, and every problem told at once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import kt_kernel
from kt_kernel import environment
from kt_kernel.tier import choose_tier
from ktransformers.errors import DeviceError
from ktransformers.operators import devices

__all__ = ["ExpertsOptions", "devices_are_strict"]

OPS = ("KExpertsCPU", "KExpertsTorch")
_NOT_HERE = {
    "KExpertsMarlin": "needs a CUDA kernel that this package does not have",
    "KSFTExpertsCPU": "is for fine-tuning",
}
_NOTHING = (None, "", "None", "none", "null")


@dataclass(frozen=True)
class ExpertsOptions:
    """The keyword arguments of `KTransformersExperts`, checked. `read` makes one from what a rule says."""

    prefill_device: str | None = None
    prefill_op: str | None = None
    generate_device: str = "cpu"
    generate_op: str = "KExpertsCPU"
    out_device: str | None = None
    backend: str | None = None
    prefill_threshold: int = 0
    rotate: bool = True
    threads: int | None = None
    strict: bool = False

    @classmethod
    def read(cls, kwargs: Mapping[str, Any]) -> ExpertsOptions:
        """Normalises the spellings of nothing ("None", "", null). Call `problems` first: values are not checked
        here.
        """
        optional = {"prefill_device", "prefill_op", "out_device", "backend", "threads"}
        given = {name: None if name in optional and value in _NOTHING else value for name, value in kwargs.items()}
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
        return self.prefill_op == "KExpertsTorch" and self.prefill_threshold > 0


def devices_are_strict(options: ExpertsOptions) -> bool:
    """A missing device is an error by the rule's `strict` or by KT_STRICT_DEVICES."""
    return options.strict or bool(environment.STRICT_DEVICES.get())


def _unknown_name(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown kwarg {name!r}" + (f", did you mean {near[0]!r}?" if near else f": there are {', '.join(known)}")


def _backend_problems(options: ExpertsOptions) -> list[str]:
    try:
        backend = kt_kernel.parse_backend(options.backend)
        if options.strict is True and options.generate_op == "KExpertsCPU":
            choose_tier(backend, strict=True)
    except (kt_kernel.BackendError, kt_kernel.UnsupportedCpuError) as error:
        return [str(error)]
    return []


def _op_problems(options: ExpertsOptions) -> list[str]:
    found = []
    for name in ("generate_op", "prefill_op"):
        op = getattr(options, name)
        if op in OPS or (op is None and name == "prefill_op"):
            continue
        if not isinstance(op, str):
            found.append(f"{name}: one of {', '.join(OPS)}, not {op!r}")
            continue
        if op in _NOT_HERE:
            found.append(f"{name}: {op} {_NOT_HERE[op]}; there are {', '.join(OPS)}")
            continue
        near = difflib.get_close_matches(op, OPS, n=1, cutoff=0.5)
        meant = f" Did you mean {near[0]}?" if near else ""
        found.append(f"{name}: there is no op {op!r}.{meant} Supported: {', '.join(OPS)}")
    return found


def _device_problems(options: ExpertsOptions) -> list[str]:
    found = []
    for name in ("prefill_device", "generate_device", "out_device"):
        asked = getattr(options, name)
        if asked is None:
            continue
        try:
            device = devices.parse(asked)
            if name == "generate_device" and options.generate_op == "KExpertsCPU" and device.type != "cpu":
                found.append(f"generate_device: KExpertsCPU runs on the CPU, write cpu in place of {asked!r}")
            else:
                devices.resolve(device, strict=devices_are_strict(options))
        except DeviceError as error:
            found.append(f"{name}: {error}")
    return found


def _number_problems(options: ExpertsOptions) -> list[str]:
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
