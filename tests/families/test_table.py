"""docs/models.md is what the installed transformers gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tools.families.scan import experts_classes
from tools.families.table import render, version_in

FILE = Path(__file__).parents[2] / "docs" / "models.md"


def _written() -> str:
    text = FILE.read_text(encoding="utf-8")
    if (version := version_in(text)) != transformers.__version__:
        pytest.skip(f"docs/models.md is of transformers {version}, {transformers.__version__} is installed")
    return text


@pytest.mark.filterwarnings("ignore")
def test_the_table_is_up_to_date() -> None:
    assert render() == _written(), "run: python -m tools.families > docs/models.md"


def test_every_class_has_its_row() -> None:
    rows = [line for line in _written().splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) == len(experts_classes())
