"""The wrappers: one MoE layer's experts on the CPU."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from kt_kernel import _ext
from kt_kernel.backends import Backend, Family, parse_backend
from kt_kernel.calls import Pending, prepare
from kt_kernel.config import MoEConfig
from kt_kernel.contexts import resolve_threads, shared_context
from kt_kernel.described import Described
from kt_kernel.errors import NotLoadedError, WeightsError, translated
from kt_kernel.gate import GateFormula
from kt_kernel.layer_formats import ROTATED, LayerFormats
from kt_kernel.packed_file import PackedLayer, Source, find_packed, map_packed, read_packed, save_packed
from kt_kernel.quantized_weights import holds_quantized, open_quantized, pack_quantized
from kt_kernel.tier import choose_tier
from kt_kernel.weights import open_weights, pack

__all__ = ["AMXMoEWrapper", "AVX2MoEWrapper", "MoEWrapper"]


class MoEWrapper(Described):
    """Runs the experts of one MoE layer on the best tier of this CPU.

    Args:
        config: `expert_num`, `hidden_size` (H), `intermediate_size` (I), `max_len`, `num_experts_per_tok` (k), and if
            wanted `swiglu_alpha`, `swiglu_limit`. `max_len` sizes scratch memory and is no limit on tokens.
        backend: format and ISA asked for, see `kt_kernel.parse_backend`. "auto" is BF16 on the best tier.
        rotate: INT8 and INT4: rotate weights and activations before quantising, which keeps outliers from costing
            accuracy.
        threads: worker threads; None takes `KT_NUM_THREADS`, else the physical cores this process may use.
        strict: an ISA family that was asked for and cannot run is an `UnsupportedCpuError`, not the next tier down.
        strict_ids: expert ids outside 0…E-1 are an `InputError`; else they contribute nothing.
        gate: the formula between the projections, in place of what `swiglu_alpha` and `swiglu_limit` say.

    Raises:
        ConfigError, BackendError, UnsupportedCpuError: before any weight is read.
    """

    _ceiling: ClassVar[Family | None] = None

    def __init__(
        self,
        config: Mapping[str, object],
        *,
        backend: str | Backend | None = "auto",
        rotate: bool = True,
        threads: int | None = None,
        strict: bool = False,
        strict_ids: bool = False,
        gate: GateFormula | None = None,
    ) -> None:
        self.config = MoEConfig.from_dict(config)
        self.gate = self.config.choose_gate(gate)
        self._backend = parse_backend(backend)
        self.config.check_format(self._backend.format)
        self._threads = resolve_threads(threads)
        self._tier = choose_tier(self._backend, ceiling=self._ceiling, strict=strict).tier
        self._rotate = bool(rotate) and self._backend.format in ROTATED
        self._strict_ids = strict_ids
        self._packed: _ext.PackedExperts | None = None
        self._moe: _ext.MoE | None = None

    @property
    def format(self) -> str:
        """Format of the packed weights: the backend's, or once weights are loaded that came quantised, the one that
        holds them exactly, such as "INT4" or "INT4+INT8_GROUPED" (gate and up, down).
        """
        return self._backend.format if self._packed is None else LayerFormats.of(self._packed).name

    @property
    def loaded(self) -> bool:
        """Whether `forward` can run."""
        return self._moe is not None

    @property
    def _is_rotated(self) -> bool:
        return self._rotate if self._packed is None else self._packed.rotated

    @property
    def nbytes(self) -> int:
        """Bytes of packed weights; 0 before `load_weights`."""
        return 0 if self._packed is None else self._packed.nbytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of packed weights that one token's experts read; 0 before `load_weights`."""
        return 0 if self._packed is None else self._packed.bytes_per_expert * self.config.num_experts_per_tok

    def expert_bytes(self, *, biased: bool = False, stored: LayerFormats | None = None) -> int:
        """Bytes of packed weights that one expert will have, known before `load_weights`. `stored`: what holds weights
        that come quantised; None: they come as floats.
        """
        sizes = 1, self.config.hidden_size, self.config.intermediate_size
        formats = stored or LayerFormats.both(self._backend.format)
        # The layout itself says it: memory is laid out for one expert and never touched.
        rotate = self._rotate and stored is None
        one = formats.allocate(*sizes, rotate=rotate, gated=self.gate.gated, biased=biased)
        return one.bytes_per_expert

    def load_weights(
        self,
        weights: Mapping[str, Any] | str | os.PathLike[str],
        prefix: str | None = None,
        *,
        mapped: bool = False,
        own_grid: bool = False,
    ) -> None:
        """Quantises and packs the experts. A failure, Ctrl-C included, leaves the wrapper as it was.

        Args:
            weights: a dictionary of tensors or numpy arrays, `gate_proj` (E, I, H), `up_proj` (E, I, H) and `down_proj`
                (E, H, I), or `gate_up_proj` (E, 2I, H), gate first, and `down_proj`; without a gate `up_proj` and
                `down_proj`. Any strides, float32, bfloat16 or float16. With them the biases there are:
                `gate_proj_bias`, `up_proj_bias` (E, I) or `gate_up_proj_bias` (E, 2I), `down_proj_bias` (E, H). Or the
                path of a `.safetensors` file or folder with those names, or with one tensor for each expert
                (`N.gate_proj.weight`, `N.gate_proj.bias`, …), under any one prefix. Or the path of a file or folder
                that convert_cpu_weights.py wrote: packed already, it is only read. Or a dictionary whose projections
                are sequences of one matrix of `kt_kernel.quantized` an expert, `gate_proj`, `up_proj`, `down_proj`:
                they are packed on their own grid, whatever format the backend would quantise floats to.
            prefix: which layer, where a file holds several, e.g. "model.layers.3.mlp.experts".
            mapped: work on a packed file where it lies, in pages that processes share, in place of a copy in memory.
            own_grid: take a packed file also when its weights came quantised and lie on their own grid in a format that
                is not the backend's, see `format`.

        Raises:
            WeightsError: what is missing, too much, misshapen, damaged, NaN or infinite, or packed for another wrapper.
        """
        context = shared_context(self._threads)
        found = find_packed(Path(weights), prefix) if isinstance(weights, (str, os.PathLike)) else None
        if found is not None:
            self._check_packed(*found, own_grid=own_grid)
            packed = map_packed(*found) if mapped else read_packed(*found)
        elif isinstance(weights, Mapping) and holds_quantized(weights):
            packed = pack_quantized(open_quantized(weights, self.config, self.gate.gated), context)
        else:
            with open_weights(weights, self.config, self.gate.gated, prefix) as experts:
                packed = pack(experts, context, self._tier, LayerFormats.both(self._backend.format), self._rotate)
        top_k, max_len = self.config.num_experts_per_tok, self.config.max_len
        moe = _ext.MoE(context, packed, self._tier, self.gate.native(), top_k, max_len)
        self._packed, self._moe = packed, moe

    def save_packed(self, path: str | os.PathLike[str], prefix: str, sources: Sequence[Source] = ()) -> None:
        """Writes the packed experts as a file that `load_weights` takes; `sources` are noted in it.

        Raises `NotLoadedError`, and `OSError` with nothing left behind.
        """
        self._loaded_moe()
        assert self._packed is not None
        save_packed(Path(path), self._packed, prefix, sources)

    def _check_packed(self, path: Path, layer: PackedLayer, *, own_grid: bool) -> None:
        """Raises `WeightsError` that names everything in which the file is not what this wrapper runs."""
        config = self.config
        quantised = {
            "format": (layer.formats.name, self._backend.format),
            "rotated": (layer.rotated, self._rotate),
        }
        # Numbers that came quantised are never rotated: that would leave their grid.
        own = layer.formats.kept_grid and layer.formats.name == self._backend.format
        taken = not layer.rotated and (own_grid or own)
        pairs = {
            **({} if taken else quantised),
            "gated": (layer.gated, self.gate.gated),
            "expert_num": (layer.experts, config.expert_num),
            "hidden_size": (layer.hidden, config.hidden_size),
            "intermediate_size": (layer.intermediate, config.intermediate_size),
        }
        if wrong := [f"{name} {there} (wanted: {here})" for name, (there, here) in pairs.items() if there != here]:
            raise WeightsError(
                f"{path} was packed for another wrapper: {', '.join(wrong)}; convert the checkpoint with the method "
                "that the backend asks for, or make the wrapper with the file's backend, rotate and sizes"
            )

    def forward(self, x: Any, expert_ids: Any, weights: Any) -> Any:
        """The weighted sum of each token's experts: (T, H), of `x`'s library and dtype, on the CPU.

        Args:
            x: (T, H) float32, bfloat16 or float16; torch CPU tensor or numpy array. T may be 0.
            expert_ids: (T, k) int32 or int64. Ids outside 0…E-1 contribute nothing; duplicates add up.
            weights: (T, k) float32, bfloat16 or float16, used as given.

        Raises:
            NotLoadedError: before `load_weights`.
            InputError: an argument the kernel cannot take; the text says what to do.
        """
        moe = self._loaded_moe()
        call = prepare(self.config, x, expert_ids, weights, strict_ids=self._strict_ids)
        with translated():
            moe.forward(*call.arguments())
        return call.out

    def submit(self, x: Any, expert_ids: Any, weights: Any) -> Pending:
        """As `forward`, without waiting: `.result()` of what it returns waits. Leave the inputs alone until then."""
        moe = self._loaded_moe()
        call = prepare(self.config, x, expert_ids, weights, strict_ids=self._strict_ids)
        with translated():
            return Pending(moe.submit(*call.arguments()), call)

    def warm_up(self) -> None:
        """Touches every packed page and runs one token through every phase, so that the first real call is not slow."""
        moe = self._loaded_moe()
        with translated():
            moe.warm_up()

    def _loaded_moe(self) -> _ext.MoE:
        if self._moe is None:
            raise NotLoadedError(f"{type(self).__name__} has no weights yet: call load_weights(...) first")
        return self._moe

    def __deepcopy__(self, memo: dict[int, Any]) -> MoEWrapper:
        # Packed weights never change, so a copied model may share them.
        return copy.copy(self)

    def __repr__(self) -> str:
        c = self.config
        state = f"{self.nbytes / 2**20:.1f} MiB" if self.loaded else "no weights"
        return (
            f"{type(self).__name__}({c.expert_num} experts, top-{c.num_experts_per_tok}, hidden {c.hidden_size}, "
            f"intermediate {c.intermediate_size}; {self.description}; {state})"
        )


class AMXMoEWrapper(MoEWrapper):
    """`MoEWrapper` that asks for AMX. Without it the next tier down runs, which is said once."""

    _ceiling = "amx"

    def __init__(
        self, config: Mapping[str, object], *, backend: str | Backend | None = "AMXINT8", **options: Any
    ) -> None:
        super().__init__(config, backend=backend, **options)


class AVX2MoEWrapper(MoEWrapper):
    """`MoEWrapper` that stays with 256-bit vectors, tier avx2 or avx_vnni, whatever else the CPU has. A backend above
    that is said once, or is an `UnsupportedCpuError` when `strict`.
    """

    _ceiling = "avx2"

    def __init__(self, config: Mapping[str, object], *, backend: str | Backend | None = "INT8", **options: Any) -> None:
        super().__init__(config, backend=backend, **options)
