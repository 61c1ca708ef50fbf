"""What a forecast says, as numbers and as sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ktransformers.errors import DoesNotFitError
from ktransformers.injection import Plan
from ktransformers.injection.lines import LayerEntry, layer_lines
from ktransformers.memory import MemoryLimit

__all__ = ["Forecast", "Holding", "in_words"]


@dataclass(frozen=True)
class Holding:
    """Weights of one kind at one place. `modules`: how many operators share it; 0 for what no rule touches."""

    what: str
    device: str
    format: str
    nbytes: int
    read_per_token: int
    modules: int = 0


@dataclass(frozen=True)
class Forecast:
    """Bytes, tokens a second. `str()` is a text, `as_dict()` plain data.

    Attributes:
        plan: which rule takes which module.
        layers: what runs where, by module.
        holdings: weights by device and format once the model is loaded.
        baseline: what this process has in memory now: Python, torch, transformers.
        loading: the peak on the host while the model loads, baseline included.
        running: on the host with a context of `context` tokens, baseline included.
        cache: of those tokens; `cache_per_1k`: of the first 1,000. None where they cannot be told.
        read_per_token: weights that a decoded token reads, on all devices.
        limits: what bounds memory here, the tightest first.
        quantisation: sentences on how often numbers are rounded.
        approximate: sentences on what is only nearly so.
        bandwidth: bytes a second that this machine reads, where it was measured.
    """

    plan: Plan
    layers: tuple[LayerEntry, ...]
    holdings: tuple[Holding, ...]
    baseline: int
    loading: int
    running: int
    context: int
    cache: int | None
    cache_per_1k: int | None
    limits: tuple[MemoryLimit, ...]
    quantisation: tuple[str, ...]
    approximate: tuple[str, ...]
    bandwidth: float | None = None

    @property
    def peak(self) -> int:
        """The most memory of the process on the host."""
        return max(self.loading, self.running)

    @property
    def needed(self) -> int:
        """What the process will take beyond what it has now."""
        return self.peak - self.baseline

    @property
    def read_per_token(self) -> int:
        return sum(holding.read_per_token for holding in self.holdings)

    @property
    def decode_ceiling(self) -> float | None:
        """Tokens a second that memory allows at most, one sequence at a time; None without a measured bandwidth."""
        return self.bandwidth / self.read_per_token if self.bandwidth and self.read_per_token else None

    @property
    def fits(self) -> bool:
        return not self.shortfalls()

    def shortfalls(self) -> list[str]:
        """A sentence with numbers for every limit that is too low."""
        return [
            f"{in_words(self.needed)} more are needed and {limit.name} leaves {in_words(limit.free)} "
            f"(of {in_words(limit.total)}): {in_words(self.needed - limit.free)} are missing"
            for limit in self.limits
            if limit.free < self.needed
        ]

    def raise_unless_fits(self) -> None:
        """Raises `DoesNotFitError` with the numbers."""
        if short := self.shortfalls():
            when = "while it loads" if self.loading >= self.running else f"with {self.context} tokens of context"
            parts = ", ".join(f"{in_words(h.nbytes)} of {h.what} in {h.format}" for h in self.holdings)
            raise DoesNotFitError(
                f"the model does not fit: {'; '.join(short)}. Its peak is {in_words(self.peak)}, {when}: {parts}, "
                f"{in_words(self.baseline)} that this process has already{self._remedy()}"
            )

    def lines(self, *, verbose: bool = False) -> list[str]:
        """As `Report.lines`: rule, backend asked for and what runs, a line for each range of layers or each module."""
        return layer_lines(self.layers, self.plan, verbose=verbose)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; bytes, and tokens a second."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        return {
            "rules": self.plan.rules.origin,
            "layers": [{"name": e.name, "rule": e.rule.number, **e.details} for e in self.layers],
            "unmatched_experts": list(self.plan.unmatched_experts),
            "weights": [vars(holding) for holding in self.holdings],
            **plain,
            "limits": [vars(limit) for limit in self.limits],
            "quantisation": list(self.quantisation),
            "approximate": list(self.approximate),
            "shortfalls": self.shortfalls(),
        }

    def __str__(self) -> str:
        return "\n".join([*self.lines(), "", *self.figures()])

    def figures(self) -> list[str]:
        """Memory by device and format, reads, the ceiling, and whether it fits, a line each."""
        rows = [("weights", "device", "format", "memory", "read a token")]
        rows += [(h.what, h.device, h.format, in_words(h.nbytes), in_words(h.read_per_token)) for h in self.holdings]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += [f"numbers: {note}" for note in self.quantisation]
        if self.cache_per_1k is not None and self.cache is not None:
            whole = f"{in_words(self.cache)} for the {self.context} counted here"
            lines.append(f"cache: {in_words(self.cache_per_1k)} for the first 1,000 tokens, {whole}")
        lines.append(f"peak: {in_words(self.loading)} while loading, {in_words(self.running)} while running")
        lines.append(f"  of it {in_words(self.baseline)} is this process now (Python, torch, transformers)")
        lines.append(f"a decoded token reads {in_words(self.read_per_token)} of weights")
        if self.decode_ceiling is not None and self.bandwidth is not None:
            speed = f"{self.bandwidth / 1e9:.1f} GB/s were measured"
            lines.append(f"decoding: at most {self.decode_ceiling:.1f} tokens/s, since {speed}")
        lines += [f"only nearly so: {note}" for note in self.approximate]
        if short := self.shortfalls():
            return [*lines, *(f"does not fit: {sentence}" for sentence in short)]
        tightest = self.limits[0]
        return [
            *lines,
            f"fits: {in_words(self.needed)} more are needed, {tightest.name} leaves {in_words(tightest.free)}",
        ]

    def _remedy(self) -> str:
        packed = {holding.format for holding in self.holdings if holding.modules}
        return "; as INT8 the experts would take about half" if "BF16" in packed else ""


_PLAIN = (
    "baseline",
    "loading",
    "running",
    "peak",
    "needed",
    "context",
    "cache",
    "cache_per_1k",
    "read_per_token",
    "bandwidth",
    "decode_ceiling",
    "fits",
)


def in_words(size: float) -> str:
    """`1.5 GiB`, `300 MiB`, `4.2 MiB`, `12 KiB`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.{1 if size < 10 * scale or unit == 'GiB' else 0}f} {unit}"
    return f"{size:.0f} bytes"
