"""How the weight matrices of a packed layer are kept: a format for each, with what belongs to it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kt_kernel import _ext

__all__ = ["ROTATED", "LayerFormats", "MatrixFormat"]

ROTATED = ("INT8", "INT4")
"""Formats whose weights, where they come as floats, are rotated before they are quantised."""

_BITS = {"INT8": 8, "BF16": 16, "INT4": 4, "INT8_GROUPED": 8, "FP8": 8}


@dataclass(frozen=True)
class MatrixFormat:
    """The format of one matrix. Grouped formats: inputs that share a scale, the whole numbers that the weights are
    multiples of (`kt_kernel.quantized.LEVELS`, or "normal4", ours for floats), whether each group has a minimum, and
    the dtype of both.
    """

    format: str
    group: int = 0
    levels: str = "int4"
    minimums: bool = False
    scales: str = "float32"

    @classmethod
    def of(cls, traits: _ext.MatrixTraits) -> MatrixFormat:
        return cls(traits.format, traits.group, traits.levels, traits.minimums, traits.scales)

    @property
    def bits(self) -> int:
        """Of one weight, without its share of scales."""
        return _BITS[self.format]

    def native(self) -> _ext.MatrixTraits:
        return _ext.MatrixTraits(**asdict(self))


@dataclass(frozen=True)
class LayerFormats:
    """Of gate and up, and of down; GGUF files mix."""

    gate_up: MatrixFormat
    down: MatrixFormat

    @classmethod
    def both(cls, format: str) -> LayerFormats:
        """What floats become: both matrices of the format's default traits."""
        matrix = MatrixFormat.of(_ext.default_traits(format))
        return cls(matrix, matrix)

    @classmethod
    def of(cls, packed: _ext.PackedExperts) -> LayerFormats:
        return cls(MatrixFormat.of(packed.gate_up), MatrixFormat.of(packed.down))

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> LayerFormats:
        """What `dataclasses.asdict` made."""
        return cls(MatrixFormat(**fields["gate_up"]), MatrixFormat(**fields["down"]))

    @property
    def name(self) -> str:
        """ "INT8", or "INT4+INT8_GROUPED" where gate and up differ from down."""
        names = dict.fromkeys((self.gate_up.format, self.down.format))
        return "+".join(names)

    @property
    def kept_grid(self) -> bool:
        """Whether weights came quantised and lie on their own grid. (FP8 does not tell.)"""
        return all(each.format in ("INT4", "INT8_GROUPED") and each.levels != "normal4" for each in self.matrices)

    @property
    def matrices(self) -> tuple[MatrixFormat, MatrixFormat]:
        return self.gate_up, self.down

    def allocate(
        self, experts: int, hidden: int, intermediate: int, *, rotate: bool, gated: bool = True, biased: bool = False
    ) -> _ext.PackedExperts:
        """Memory for a layer's packed experts. Raises `MemoryError`, and `KernelError` for sizes no layout holds."""
        matrices = self.gate_up.native(), self.down.native()
        return _ext.PackedExperts(experts, hidden, intermediate, *matrices, rotate, gated, biased)

    def map(
        self,
        path: str,
        offset: int,
        experts: int,
        hidden: int,
        intermediate: int,
        *,
        rotate: bool,
        gated: bool = True,
        biased: bool = False,
    ) -> _ext.PackedExperts:
        """A layer's packed experts in a file, from `offset` on. Raises `KernelError` when it cannot be mapped."""
        matrices = self.gate_up.native(), self.down.native()
        return _ext.PackedExperts.map(path, offset, experts, hidden, intermediate, *matrices, rotate, gated, biased)
