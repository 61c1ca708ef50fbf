"""Experts on the CPU kernel: one layer's packed weights, and the way its inputs and results travel."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from kt_kernel import GateFormula, MoEWrapper, parse_backend
from kt_kernel.backends import AUTO
from kt_kernel.layer_formats import LayerFormats
from kt_kernel.quantized_weights import held_in
from ktransformers.experts import ExpertsSpec, ModuleWeights, layer_weights
from ktransformers.log import warn_once
from ktransformers.operators.overlap import Completion, DeferredTensor
from ktransformers.operators.transport import HostBatch, Transport, transport_for

__all__ = ["KExpertsCPU"]

# Tokens that scratch memory is sized for; longer prompts go through in pieces of that size.
_MAX_LEN = 1024
# The kernel's own bound on the rows (token, slot) of a piece.
_MOST_ROWS = 16384
# Where a configuration does not say how many experts a token takes. Sizes scratch too.
_USUAL_TOP_K = 8


class KExpertsCPU:
    """Runs on `kt_kernel.MoEWrapper`. Packed weights are read-only, so copies of the operator share this object."""

    name = "KExpertsCPU"

    def __init__(
        self, spec: ExpertsSpec, *, backend: str | None, rotate: bool, threads: int | None, strict: bool
    ) -> None:
        assert spec.gate is not None, "the caller checks spec.unsupported first"
        # A norm stands between an expert's output and the sum: each slot then goes through as a token of its own.
        one_by_one = spec.has_post_expert_norm or spec.is_presorted
        top_k = 1 if one_by_one else min(spec.top_k or _USUAL_TOP_K, spec.num_experts)
        config = {
            "expert_num": spec.num_experts,
            "hidden_size": spec.hidden_dim,
            "intermediate_size": spec.intermediate_dim,
            "max_len": _MAX_LEN,
            "num_experts_per_tok": top_k,
        }
        self._spec = spec
        self._norm: nn.Module | None = None
        self._backend = backend
        gate = GateFormula(**dataclasses.asdict(spec.gate))
        self.wrapper = MoEWrapper(config, backend=backend, rotate=rotate, threads=threads, strict=strict, gate=gate)

    def expert_bytes(self, stored: LayerFormats | None = None) -> int:
        """Packed bytes of one expert, known before `load`; `stored` as for `keeps`."""
        formats = stored if self.keeps(stored) else None
        return self.wrapper.expert_bytes(biased=self._spec.has_bias, stored=formats)

    def keeps(self, stored: LayerFormats | None) -> bool:
        """Whether weights that are stored quantised, in what `stored` packs exactly, keep their numbers: where no other
        format was asked for.
        """
        return stored is not None and (parse_backend(self._backend) == AUTO or stored.name == self.wrapper.format)

    def description(self, stored: LayerFormats | None = None) -> str:
        """Who will run, as `MoEWrapper.description` says it."""
        if stored is None or not self.keeps(stored):
            return self.wrapper.description
        return self.wrapper.describe(stored.name)

    @property
    def scratch_bytes(self) -> int:
        """Working memory of the longest piece of a prompt, at most: for each row its inputs or outputs (fp32), what is
        between the projections (fp32), and that once more as the second one takes it (16 bits).
        """
        config = self.wrapper.config
        rows = min(_MAX_LEN * config.num_experts_per_tok, _MOST_ROWS)
        return rows * (4 * config.hidden_size + 6 * config.intermediate_size)

    def load(self, module: nn.Module) -> None:
        """Quantises and packs the module's weights."""
        if self._spec.has_post_expert_norm:
            self._norm = copy.deepcopy(module.get_submodule("post_expert_norm"))
        self.wrapper.load_weights(layer_weights(module, self._spec).named())

    def load_from(self, weights: ModuleWeights) -> None:
        """Packs expert by expert, as they are read. For experts whose outputs are not normalised.

        Weights that are stored quantised keep their numbers where no other format than theirs was asked for; else they
        are decoded and quantised a second time, which is said.
        """
        stored = weights.quantized(self._spec)
        if stored is not None and (parse_backend(self._backend) == AUTO or self._holds(stored)):
            self.wrapper.load_weights(stored)
            return
        self.wrapper.load_weights(weights.experts(self._spec))
        if stored is not None and self.wrapper.format != "BF16":
            warn_once(
                f"{self.wrapper.backend}: the file's quantised experts are quantised a second time, to "
                f"{self.wrapper.format}; backend auto keeps their own numbers."
            )

    def _holds(self, stored: Mapping[str, Any]) -> bool:
        """Whether the backend's format is the one that holds quantised experts exactly."""
        first = {name: matrices[0] for name, matrices in stored.items() if not name.endswith("_bias")}
        return held_in(first) == self.wrapper.format

    def forward(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out_device: torch.device,
        transport: Transport | None = None,
    ) -> torch.Tensor:
        """hidden (T, H), ids (T, k), weights (T, k) on one device → (T, H) on `out_device`, in hidden's dtype.

        From the CPU the result is complete. From another device it may be a `DeferredTensor`, awaited at its first use.
        `transport` is for tests; by default it is the one of hidden's device.
        """
        transport = transport or transport_for(hidden.device)
        if self._norm is not None:
            return self._normed(hidden, ids, weights, out_device, transport)
        return self._summed(hidden, ids, weights, out_device, transport)

    def _normed(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out_device: torch.device,
        transport: Transport,
    ) -> torch.Tensor:
        """The kernel's output of each (token, slot), normalised by the module's own norm, then weighted and summed."""
        assert self._norm is not None
        tokens, slots = ids.shape
        rows = hidden.float().repeat_interleave(slots, dim=0)  # fp32, so that the norm sees what is not rounded yet
        each = self._summed(rows, ids.reshape(-1, 1), torch.ones_like(rows[:, :1]), out_device, transport)
        normed = self._norm.to(out_device)(each).view(tokens, slots, hidden.shape[1])
        there = (ids >= 0) & (ids < self._spec.num_experts)
        # Not times zero: the norm of an expert that is not there may be NaN.
        weighted = torch.where(there[..., None].to(out_device), normed * weights[..., None].to(out_device), 0.0)
        return weighted.float().sum(dim=1).to(hidden.dtype)

    def _summed(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out_device: torch.device,
        transport: Transport,
    ) -> torch.Tensor:
        """The kernel's weighted sum over the slots, in parts where a router fills more than it was built for."""
        slots = self.wrapper.config.num_experts_per_tok
        if ids.shape[1] > slots:
            wide = hidden.float()
            pairs = zip(torch.split(ids, slots, dim=1), torch.split(weights, slots, dim=1), strict=True)
            parts = [self._summed(wide, part, share, out_device, transport) for part, share in pairs]
            return torch.stack(parts).sum(dim=0).to(hidden.dtype)
        ids, weights = self._padded(ids, weights)
        batch = transport.fetch(hidden, ids, weights)
        if not transport.defers:
            return transport.deliver(batch, self.wrapper.forward(batch.hidden, batch.ids, batch.weights), out_device)
        return self._deferred(batch, transport, out_device)

    def _padded(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """With as many slots as the kernel was built for: empty ones (id −1) where the router fills fewer."""
        missing = self.wrapper.config.num_experts_per_tok - ids.shape[1]
        if missing <= 0:
            return ids, weights
        return nn.functional.pad(ids, (0, missing), value=-1), nn.functional.pad(weights, (0, missing))

    def _deferred(self, batch: HostBatch, transport: Transport, out_device: torch.device) -> torch.Tensor:
        try:
            pending = self.wrapper.submit(batch.hidden, batch.ids, batch.weights)
        except BaseException:
            transport.release(batch)
            raise

        def finish() -> torch.Tensor:
            try:
                result = pending.result()
            except BaseException:
                transport.release(batch)
                raise
            return transport.deliver(batch, result, out_device)

        def abandon() -> None:
            # The kernel may still be reading the batch: its memory is not given to anybody else before that is over.
            try:
                pending.result()
            finally:
                transport.release(batch)

        like = torch.empty(batch.hidden.shape, dtype=batch.hidden.dtype, device="meta")
        return DeferredTensor(like, out_device, Completion(finish, abandon))
