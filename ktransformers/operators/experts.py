"""`KTransformersExperts`: stands in for a transformers experts module and chooses, call by call, what computes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

import kt_kernel
from kt_kernel.layer_formats import LayerFormats
from ktransformers.errors import KTransformersError, UnsupportedModuleError
from ktransformers.experts import ExpertsSpec, ModuleWeights
from ktransformers.log import warn_once
from ktransformers.operators import devices
from ktransformers.operators.base import BaseInjectedModule, outside_of_graphs
from ktransformers.operators.experts_cpu import KExpertsCPU
from ktransformers.operators.experts_torch import KExpertsTorch
from ktransformers.operators.footprint import Footprint
from ktransformers.operators.options import ExpertsOptions, devices_are_strict
from ktransformers.operators.sorted_rows import routing_of_sorted

__all__ = ["KExpertsCPU", "KExpertsTorch", "KTransformersExperts"]


class KTransformersExperts(BaseInjectedModule):
    """Experts of one layer: `forward(hidden (T, H), ids (T, k), weights (T, k)) -> (T, H)`, as transformers calls them.

    Args:
        key: dotted name in the model.
        gguf_loader: accepted for upstream's calling convention; not used.
        config: the model's configuration.
        orig_module: the transformers experts module, live.
        prefill_device, prefill_op: what takes prompts of more than `prefill_threshold` tokens: with `KExpertsTorch`,
            the float weights are streamed to the device for the call. With threshold 0, or when the host lacks the
            device, the generate op does all.
        generate_device, generate_op: what takes everything else: `KExpertsCPU` (the kernel) or `KExpertsTorch`.
        out_device: where results land; None and hosts without it: where the hidden states came from.
        backend: `AMXINT8`, `AMXBF16`, …; None, "" and "auto" choose.
        rotate: INT8 with Hadamard rotation (False: without).
        threads: of the kernel; None: `KT_NUM_THREADS`, or what the machine gives.
        strict: refuse, rather than replace, devices, CPU tiers and arithmetic that are not there exactly as asked for.
    """

    _shared_attributes: ClassVar[frozenset[str]] = BaseInjectedModule._shared_attributes | {
        "spec",
        "options",
        "_kernel",
    }

    def __init__(
        self,
        key: str,
        gguf_loader: object = None,
        config: Any = None,
        orig_module: nn.Module | None = None,
        prefill_device: str | None = None,
        prefill_op: str | None = None,
        generate_device: str = "cpu",
        generate_op: str = "KExpertsCPU",
        out_device: str | None = None,
        backend: str | None = None,
        prefill_threshold: int = 0,
        rotate: bool = True,
        threads: int | None = None,
        strict: bool = False,
    ) -> None:
        if orig_module is None:
            raise TypeError("KTransformersExperts takes the place of an experts module: pass it as orig_module")
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
        self.options = ExpertsOptions.read(kwargs)
        self.spec = ExpertsSpec.from_module(orig_module)
        self.num_experts = self.spec.num_experts
        self.hidden_dim = self.spec.hidden_dim
        self.intermediate_dim = self.spec.intermediate_dim
        self.out_device = devices.landing_place(self.options.out_device, strict=devices_are_strict(self.options))
        """Where results land; None: where the hidden states came from."""
        self._kernel: KExpertsCPU | None = None
        self._generate = self._choose_generate(orig_module)
        self._prefill = self._choose_prefill(orig_module)

    @classmethod
    def check(cls, *, key: str, orig_module: nn.Module, config: Any, kwargs: Mapping[str, Any]) -> list[str]:  # noqa: ARG003
        """Problems as sentences: kwargs, devices, backend, environment variables, and whether `orig_module` is an
        experts module at all.
        """
        problems = ExpertsOptions.problems(kwargs)
        try:
            spec = ExpertsSpec.from_module(orig_module)
        except KTransformersError as error:
            return [*problems, str(error)]
        if spec.top_k is not None and not 0 < spec.top_k <= spec.num_experts:
            problems.append(
                f"the configuration sends each token to {spec.top_k} experts, and {spec.class_name} has "
                f"{spec.num_experts}: one of the two is wrong in the configuration"
            )
        if kwargs.get("strict") is True and spec.unsupported and kwargs.get("generate_op") != "KExpertsTorch":
            problems.append(
                f"strict: the kernel does not compute {spec.class_name} exactly: {'; '.join(spec.unsupported)}"
            )
        return problems

    def load(self) -> None:
        """Packs the float weights for the kernel, or copies them to the device that computes."""
        self._say_notes()
        if self._kernel is not None:
            self._kernel.load(self.orig_module)
        for op in (self._generate, self._prefill):
            if op is not None:
                op.load()

    def load_from(self, weights: ModuleWeights) -> None:
        """Packs experts as they are read. The original gets floats only where it computes or normalises itself."""
        if self._kernel is None or self.packed_in is None:
            weights.fill(self.orig_module)
            self.load()
            return
        self._say_notes()
        self._kernel.load_from(weights)

    @property
    def packed_in(self) -> kt_kernel.MoEWrapper | None:
        """What alone holds the weights this operator computes with, so that they can be kept as a file and loaded from
        one; None where float weights are needed too.
        """
        if self._kernel is None or self.needs_original or self.spec.has_post_expert_norm:
            return None
        return self._kernel.wrapper

    def warm_up(self) -> None:
        """Reads all packed weights once, so that the first tokens do not wait for pages of a mapped file."""
        if self._kernel is not None:
            self._kernel.wrapper.warm_up()

    def _say_notes(self) -> None:
        for note in self.spec.notes:
            warn_once(f"{self.key}: {note}; the tensors are followed.", key=f"{self.spec.class_name}: {note}")

    @outside_of_graphs
    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor | None = None,
        top_k_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The experts' weighted sum (T, H) in the dtype of `hidden_states`, on `out_device`.

        Experts that take their rows sorted (Llama-4) are called with (E·T, H) and nothing else, and give (E·T, H).
        """
        tokens = hidden_states.shape[0]
        if self.spec.is_presorted:
            top_k_index, top_k_weights = routing_of_sorted(hidden_states, self.num_experts)
            tokens //= self.num_experts
        if top_k_index is None or top_k_weights is None:
            raise kt_kernel.InputError(f"{self.key} takes hidden states, expert ids and routing weights")
        self._refuse(hidden_states, top_k_index, top_k_weights)
        landing = self.out_device or hidden_states.device
        if self._prefill is not None and tokens > self.options.prefill_threshold:
            return self._prefill.forward(hidden_states, top_k_index, top_k_weights).to(landing)
        if self._kernel is not None:
            return self._kernel.forward(hidden_states, top_k_index, top_k_weights, landing)
        assert self._generate is not None
        return self._generate.forward(hidden_states, top_k_index, top_k_weights).to(landing)

    @property
    def needs_original(self) -> bool:
        return self._generate is not None or self._prefill is not None

    @property
    def active_backend(self) -> str:
        """What computes this layer, such as `AMXINT8 → INT8 on avx2, 2 threads (KExpertsCPU)`."""
        parts = []
        if self._kernel is not None:
            parts.append(f"{self._kernel.wrapper.description} (KExpertsCPU)")
        if self._generate is not None:
            parts.append(f"torch on {self._generate.device} (KExpertsTorch)")
        if self._prefill is not None:
            parts.append(
                f"above {self.options.prefill_threshold} tokens torch on {self._prefill.device} (KExpertsTorch)"
            )
        return ", ".join(parts)

    def describe(self) -> dict[str, str]:
        asked = kt_kernel.parse_backend(self.options.backend).name
        if self._kernel is not None:
            wrapper = self._kernel.wrapper
            row = {"op": "KExpertsCPU", "format": wrapper.format, "tier": wrapper.tier, "device": "cpu"}
            size = wrapper.nbytes
        else:
            assert self._generate is not None
            row = {"op": "KExpertsTorch", "format": str(self.spec.dtype).removeprefix("torch."), "tier": "torch"}
            row["device"], size = str(self._generate.device), self._generate.nbytes
        return {"backend": asked, **row, "bytes": str(size), "runs": self.active_backend}

    def footprint(self, stored: LayerFormats | None = None) -> Footprint:
        told = {key: value for key, value in self.describe().items() if key != "bytes"}
        if stored is not None and self._kernel is not None and self._kernel.keeps(stored):
            told["format"] = stored.name
            told["runs"] = told["runs"].replace(self._kernel.description(), self._kernel.description(stored))
        floats = sum(parameter.nbytes for parameter in self.orig_module.parameters())
        # Where the configuration does not say how many experts a token takes, all of them are the safe answer.
        chosen = min(self.spec.top_k or self.num_experts, self.num_experts)
        if self._kernel is not None:
            size = self._kernel.expert_bytes(stored)
            held, read, scratch = size * self.num_experts, size * chosen, self._kernel.scratch_bytes
        else:
            assert self._generate is not None
            # A copy on another device; on the CPU the original's own weights are computed with.
            held, scratch = floats if self._generate.device.type != "cpu" else 0, 0
            read = floats * chosen // self.num_experts
        return Footprint(told["device"], told["format"], held, read, self.needs_original, scratch, told)

    def extra_repr(self) -> str:
        sizes = f"experts={self.num_experts}, hidden={self.hidden_dim}, intermediate={self.intermediate_dim}"
        return f"{sizes}, {self.active_backend}"

    def _choose_generate(self, orig_module: nn.Module) -> KExpertsTorch | None:
        """Sets the kernel up, or gives the torch op that runs in its place."""
        options = self.options
        if options.generate_op == "KExpertsCPU" and not self.spec.unsupported:
            self._kernel = KExpertsCPU(
                self.spec,
                backend=options.backend,
                rotate=options.rotate,
                threads=options.threads,
                strict=options.strict,
            )
            return None
        if options.generate_op == "KExpertsCPU":
            reasons = "; ".join(self.spec.unsupported)
            warn_once(f"{self.spec.class_name} runs in KExpertsTorch, not in the kernel: {reasons}.")
        device = devices.resolve(options.generate_device, strict=devices_are_strict(options)).device
        return KExpertsTorch(orig_module, self.spec, device, resident=True)

    def _choose_prefill(self, orig_module: nn.Module) -> KExpertsTorch | None:
        place = self.options.prefill_place()
        return None if place is None else KExpertsTorch(orig_module, self.spec, place, resident=False)

    def _refuse(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self.refuse_tracing_and_gradients(hidden, weights)
        if (
            hidden.dim() != 2
            or hidden.shape[1] != self.hidden_dim
            or ids.shape != weights.shape
            or len(ids) != len(hidden)
        ):
            raise kt_kernel.InputError(
                f"{self.key}: hidden states (tokens, {self.hidden_dim}), ids and weights (tokens, k) were expected, "
                f"got {tuple(hidden.shape)}, {tuple(ids.shape)}, {tuple(weights.shape)}"
            )
