"""`KTransformersLinear`: stands in for an `nn.Linear` and chooses what computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import nn

import kt_kernel
from kt_kernel.layer_formats import LayerFormats
from ktransformers.errors import UnsupportedModuleError
from ktransformers.experts import ModuleWeights
from ktransformers.log import warn_once
from ktransformers.operators import devices
from ktransformers.operators.base import BaseInjectedModule, outside_of_graphs
from ktransformers.operators.footprint import Footprint
from ktransformers.operators.linear_cpu import KLinearCPU
from ktransformers.operators.linear_torch import KLinearTorch
from ktransformers.operators.options import LinearOptions, devices_are_strict

__all__ = ["KLinearCPU", "KLinearTorch", "KTransformersLinear"]


class KTransformersLinear(BaseInjectedModule):
    """A linear layer: `forward(x (…, K)) -> (…, N)` in x's dtype.

    Args:
        key: dotted name in the model.
        gguf_loader: accepted for upstream's calling convention; not used.
        config: the model's configuration.
        orig_module: the `nn.Linear`, live.
        prefill_device, prefill_op: what takes inputs of more than `prefill_threshold` rows: with `KLinearTorch`, the
            float weights are streamed to the device for the call. With threshold 0, or when the host lacks the device,
            the generate op does all.
        generate_device, generate_op: what takes everything else: `KLinearCPU` (the kernel) or `KLinearTorch`.
        out_device: where results land; None and hosts without it: where x came from.
        backend, rotate, threads, strict: as for `KTransformersExperts`.
    """

    _shared_attributes: ClassVar[frozenset[str]] = BaseInjectedModule._shared_attributes | {"options", "_kernel"}
    orig_module: nn.Linear

    def __init__(
        self,
        key: str,
        gguf_loader: object = None,
        config: Any = None,
        orig_module: nn.Module | None = None,
        prefill_device: str | None = None,
        prefill_op: str | None = None,
        generate_device: str = "cpu",
        generate_op: str = "KLinearCPU",
        out_device: str | None = None,
        backend: str | None = None,
        prefill_threshold: int = 0,
        rotate: bool = True,
        threads: int | None = None,
        strict: bool = False,
    ) -> None:
        if not isinstance(orig_module, nn.Linear):
            raise TypeError("KTransformersLinear takes the place of an nn.Linear: pass it as orig_module")
        super().__init__(key, gguf_loader, config, orig_module)
        kwargs: dict[str, Any] = {
            "prefill_device": prefill_device,
            "prefill_op": prefill_op,
            "generate_device": generate_device,
            "generate_op": generate_op,
            "out_device": out_device,
            "backend": backend,
            "prefill_threshold": prefill_threshold,
            "rotate": rotate,
            "threads": threads,
            "strict": strict,
        }
        if problems := self.check(key=key, orig_module=orig_module, config=config, kwargs=kwargs):
            raise UnsupportedModuleError(f"{key}: {'; '.join(problems)}")
        self.options = LinearOptions.read(kwargs)
        self.in_features = orig_module.in_features
        self.out_features = orig_module.out_features
        self.out_device = devices.landing_place(self.options.out_device, strict=devices_are_strict(self.options))
        """Where results land; None: where x came from."""
        self._kernel: KLinearCPU | None = None
        self._packed_from: tuple[int, ...] = ()
        self._generate = self._choose_generate(orig_module)
        self._prefill = self._choose_prefill(orig_module)

    @classmethod
    def check(cls, *, key: str, orig_module: nn.Module, config: Any, kwargs: Mapping[str, Any]) -> list[str]:  # noqa: ARG003
        """Problems as sentences: kwargs, devices, backend, environment variables, and whether `orig_module` computes
        what an `nn.Linear` does.
        """
        problems = LinearOptions.problems(kwargs)
        if not isinstance(orig_module, nn.Linear):
            problems.append(f"{key} is a {type(orig_module).__name__}, no nn.Linear")
        elif kwargs.get("strict") is True and _has_own_forward(orig_module):
            problems.append(f"strict: {_own_forward(orig_module)}")
        elif 0 in (orig_module.in_features, orig_module.out_features):
            sizes = f"{orig_module.in_features} inputs and {orig_module.out_features} outputs"
            problems.append(f"{key} is a linear layer of {sizes}: there is nothing to compute")
        return problems

    def load(self) -> None:
        """Packs the float weights for the kernel, or copies them to the device that computes."""
        if self._kernel is not None:
            self._kernel.load(self.orig_module)
            self._packed_from = self._addresses()
        for op in (self._generate, self._prefill):
            if op is not None:
                op.load()

    def load_from(self, weights: ModuleWeights) -> None:
        """Packs the layer as it is read."""
        weights.fill(self.orig_module)
        self.load()

    @outside_of_graphs
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, K) → (…, N) in x's dtype, on `out_device`."""
        self.refuse_tracing_and_gradients(x)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise kt_kernel.InputError(f"{self.key}: x (…, {self.in_features}) was expected, got {tuple(x.shape)}")
        landing = self.out_device or x.device
        if self._prefill is not None and x.numel() // self.in_features > self.options.prefill_threshold:
            return self._prefill.forward(x).to(landing)
        if self._generate is not None:
            return self._generate.forward(x).to(landing)
        assert self._kernel is not None
        if self.has_float_weights and self._addresses() != self._packed_from:
            raise RuntimeError(
                f"{self.key} runs as KTransformersLinear on weights packed at injection, and its float weights were "
                "exchanged since. Where the model itself does that in its forward (Jamba's dt_proj), leave the layer "
                "out of the rules; else undo the injection, change them, and inject again"
            )
        return self._kernel.forward(x).to(landing)

    @property
    def needs_original(self) -> bool:
        return self._generate is not None or self._prefill is not None

    @property
    def weight(self) -> torch.Tensor:
        """The original's float weight (N, K). On the meta device once the floats were freed."""
        return self.orig_module.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The original's float bias (N), if there is one."""
        return self.orig_module.bias

    @property
    def active_backend(self) -> str:
        """What computes this layer, such as `INT8 → INT8 on avx2, 2 threads (KLinearCPU)`."""
        parts = []
        if self._kernel is not None:
            parts.append(f"{self._kernel.wrapper.description} (KLinearCPU)")
        if self._generate is not None:
            parts.append(f"torch on {self._generate.device} (KLinearTorch)")
        if self._prefill is not None:
            parts.append(f"above {self.options.prefill_threshold} rows torch on {self._prefill.device} (KLinearTorch)")
        return ", ".join(parts)

    def describe(self) -> dict[str, str]:
        asked = kt_kernel.parse_backend(self.options.backend).name
        if self._kernel is not None:
            wrapper = self._kernel.wrapper
            row = {"op": "KLinearCPU", "format": wrapper.format, "tier": wrapper.tier, "device": "cpu"}
            size = wrapper.nbytes
        else:
            assert self._generate is not None
            dtype = str(self.orig_module.weight.dtype).removeprefix("torch.")
            row = {"op": "KLinearTorch", "format": dtype, "tier": "torch", "device": str(self._generate.device)}
            size = self._generate.nbytes
        return {"backend": asked, **row, "bytes": str(size), "runs": self.active_backend}

    def footprint(self, stored: LayerFormats | None = None) -> Footprint:  # noqa: ARG002
        told = {key: value for key, value in self.describe().items() if key != "bytes"}
        floats = sum(parameter.nbytes for parameter in self.orig_module.parameters())
        if self._kernel is not None:
            held = self._kernel.wrapper.packed_bytes(biased=self.orig_module.bias is not None)
            return Footprint(told["device"], told["format"], held, held, self.needs_original, details=told)
        assert self._generate is not None
        # A copy on another device; on the CPU the original's own weights are computed with.
        held = floats if self._generate.device.type != "cpu" else 0
        return Footprint(told["device"], told["format"], held, floats, self.needs_original, details=told)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.active_backend}"

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias"):
            if value is getattr(self.orig_module, name):  # weights that are tied again
                return
            raise RuntimeError(
                f"{self.key} runs as KTransformersLinear on weights packed at injection, so its {name} cannot be "
                "replaced: undo the injection, change it, and inject again"
            )
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._packed_from = self._addresses()  # another dtype is another place
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = super().__deepcopy__(memo)
        twin._packed_from = twin._addresses()
        return twin

    def _addresses(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self.orig_module.parameters())

    def _choose_generate(self, orig_module: nn.Linear) -> KLinearTorch | None:
        """Sets the kernel up, or gives the torch op that runs in its place."""
        options = self.options
        if options.generate_op == options.CPU_OP and not _has_own_forward(orig_module):
            self._kernel = KLinearCPU(
                orig_module,
                backend=options.backend,
                rotate=options.rotate,
                threads=options.threads,
                strict=options.strict,
            )
            return None
        if options.generate_op == options.CPU_OP:
            warn_once(f"{_own_forward(orig_module)}: it runs in KLinearTorch, not in the kernel.")
        device = devices.resolve(options.generate_device, strict=devices_are_strict(options)).device
        return KLinearTorch(orig_module, device, resident=True)

    def _choose_prefill(self, orig_module: nn.Linear) -> KLinearTorch | None:
        place = self.options.prefill_place()
        return None if place is None else KLinearTorch(orig_module, place, resident=False)


def _has_own_forward(module: nn.Linear) -> bool:
    return type(module).forward is not nn.Linear.forward


def _own_forward(module: nn.Linear) -> str:
    return f"{type(module).__name__} is an nn.Linear with a forward of its own, which the kernel does not know"
