"""Every Python snippet of docs/python-api.md and docs/loading.md runs, in order, in one program a page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.folders import make_checkpoint

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "python-api.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_every_snippet_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "Qwen3-Moe")
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == 6
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    assert isinstance(names["text"], str)
    out = capsys.readouterr().out
    assert "AMXINT8 → INT8 on" in out
    assert names["layer"].passed


def test_the_snippet_on_loading_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "Qwen3-Moe")
    monkeypatch.chdir(tmp_path)
    (block,) = BLOCK.findall((DOCS / "loading.md").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    exec(compile(block, "loading.md", "exec"), names)
    assert len(names["model"].hf_quantizer.report.replacements) == 2


def test_the_table_of_kwargs_is_complete() -> None:
    from dataclasses import fields

    from ktransformers.operators.options import ExpertsOptions

    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (`[a-z_`, ]+) \|", text[text.index("| kwarg |") : text.index("A host without CUDA")], re.MULTILINE
    )
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert told == {field.name for field in fields(ExpertsOptions)}
