"""`LinearWrapper`: one linear layer on the CPU, on the same packed weights and numerics as the experts."""

from __future__ import annotations

import copy
import math
from typing import Any

from kt_kernel import _ext
from kt_kernel.arrays import FLOATS, Array, as_float32, empty_like, mention_gradient, view
from kt_kernel.backends import Backend, parse_backend
from kt_kernel.config import too_many_inputs
from kt_kernel.contexts import resolve_threads, shared_context
from kt_kernel.described import Described
from kt_kernel.errors import ConfigError, InputError, NotLoadedError, WeightsError, translated
from kt_kernel.layer_formats import ROTATED, LayerFormats
from kt_kernel.tier import choose_tier

__all__ = ["LinearWrapper"]


class LinearWrapper(Described):
    """Runs y = x·Wᵀ + bias on the best tier of this CPU.

    Args:
        in_features: K, inputs of a channel, at least 1.
        out_features: N, channels, at least 1.
        backend, rotate, threads, strict: as for `MoEWrapper`.

    A row's result does not depend on the other rows of a call; with INT8 its bits are equal on every tier and number of
    threads.

    Raises:
        ConfigError, BackendError, UnsupportedCpuError: before any weight is read.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        backend: str | Backend | None = "auto",
        rotate: bool = True,
        threads: int | None = None,
        strict: bool = False,
    ) -> None:
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size < 2**31:
                raise ConfigError(f"{name} is {size!r}; it has to be a whole number from 1 to 2147483647")
        self.in_features = in_features
        self.out_features = out_features
        self._backend = parse_backend(backend)
        if problem := too_many_inputs(self._backend.format, {"in_features": in_features}):
            raise ConfigError(problem)
        self._threads = resolve_threads(threads)
        self._tier = choose_tier(self._backend, strict=strict).tier
        self._rotate = bool(rotate) and self._backend.format in ROTATED
        self._packed: _ext.PackedMatrix | None = None
        self._linear: _ext.Linear | None = None

    @property
    def loaded(self) -> bool:
        """Whether `forward` can run."""
        return self._linear is not None

    def packed_bytes(self, *, biased: bool = False) -> int:
        """What `nbytes` will be, known before `load_weights`."""
        return self._allocate(biased).nbytes  # the layout itself says it: memory is laid out and never touched

    @property
    def nbytes(self) -> int:
        """Bytes of packed weights, all of which one row reads; 0 before `load_weights`."""
        return 0 if self._packed is None else self._packed.nbytes

    def load_weights(self, weight: Any, bias: Any = None) -> None:
        """Quantises and packs. A failure leaves the wrapper as it was.

        Args:
            weight: (N, K), torch CPU tensor or numpy array, any strides, float32, bfloat16 or float16.
            bias: (N) of any of these dtypes, or None.

        Raises:
            WeightsError: a shape or dtype that does not fit, a weight that is NaN or infinite.
        """
        matrix = self._read(weight, "weight", (self.out_features, self.in_features))
        biases = None if bias is None else as_float32(self._read(bias, "bias", (self.out_features,)).owner)
        context = shared_context(self._threads)
        try:
            packed = self._allocate(biases is not None)
        except MemoryError:
            least = math.prod(matrix.shape) * LayerFormats.both(self.format).down.bits // 8
            raise MemoryError(
                f"no memory for the packed {self.format} weights of a linear layer {self.out_features} × "
                f"{self.in_features}, {least} bytes ({least / 2**30:.1f} GiB) or a little more; free some, or raise "
                "the process's limit"
            ) from None
        address = 0 if biases is None else biases.ctypes.data
        with translated():
            packed.pack(
                context, self._tier, matrix.address, (matrix.strides[0], matrix.strides[1]), matrix.dtype, address
            )
            linear = _ext.Linear(context, packed, self._tier)
        self._packed, self._linear = packed, linear

    def forward(self, x: Any) -> Any:
        """(…, K) → (…, N), of `x`'s library and dtype, on the CPU.

        Args:
            x: float32, bfloat16 or float16; torch CPU tensor or numpy array. Any leading dimensions, also of size 0.

        Raises:
            NotLoadedError: before `load_weights`.
            InputError: an argument the kernel cannot take; the text says what to do.
        """
        if self._linear is None:
            raise NotLoadedError("LinearWrapper has no weights yet: call load_weights(...) first")
        mention_gradient(x, "x")
        rows = view(x, "x", FLOATS, contiguous=True)
        if not rows.shape or rows.shape[-1] != self.in_features:
            raise InputError(f"x has shape {rows.shape}; expected (…, {self.in_features})")
        leading = rows.shape[:-1]
        out = empty_like(x, (*leading, self.out_features))
        result = view(out, "out", FLOATS)
        with translated():
            self._linear.forward(math.prod(leading), rows.address, rows.dtype, result.address, result.dtype)
        return out

    def _allocate(self, biased: bool) -> _ext.PackedMatrix:
        traits = LayerFormats.both(self.format).down.native()
        return _ext.PackedMatrix(self.out_features, self.in_features, traits, self._rotate, biased)

    def _read(self, value: object, name: str, shape: tuple[int, ...]) -> Array:
        try:
            array = view(value, name, FLOATS)
        except InputError as error:
            raise WeightsError(str(error)) from error
        if array.shape != shape:
            expected = f"{shape}: {'out_features by in_features' if len(shape) == 2 else 'out_features'}"
            raise WeightsError(f"{name} has shape {array.shape}; expected {expected}")
        return array

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearWrapper:
        # Packed weights never change, so a copied model may share them.
        return copy.copy(self)

    def __repr__(self) -> str:
        state = f"{self.nbytes / 2**20:.1f} MiB" if self.loaded else "no weights"
        return f"LinearWrapper({self.in_features} → {self.out_features}; {self.description}; {state})"
