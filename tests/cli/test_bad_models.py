"""Checkpoints that cannot run, as a script meets them: an exit code, words that say what is wrong where, no text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Kt
from tests.models import make_qwen3_moe

UP = "model.layers.2.mlp.experts.5.up_proj.weight"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Three layers in several files with an index."""
    folder = tmp_path / "model"
    make_qwen3_moe().save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def _index(folder: Path) -> dict[str, str]:
    files: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return files


def _shard(folder: Path) -> Path:
    return folder / _index(folder)[UP]


def _lose_shard(folder: Path) -> None:
    _shard(folder).unlink()


def _cut_shard(folder: Path) -> None:
    data = _shard(folder).read_bytes()
    _shard(folder).write_bytes(data[: len(data) // 2])


def _name_another_file(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(f'"{UP}": "{_index(folder)[UP]}"', f'"{UP}": "gone.safetensors"'))


def _change(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(_shard(folder))
        save_file({**tensors, UP: change(tensors[UP])}, _shard(folder), metadata={"format": "pt"})

    return apply


def _configure(**changes: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return apply


def _cut_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _not_a_number(weight: torch.Tensor) -> torch.Tensor:
    weight[3, 7] = float("nan")
    return weight


BAD: dict[str, tuple[Callable[[Path], None], int, list[str]]] = {
    "a shard that is missing": (_lose_shard, 2, ["lacks 1 of its", "weight files: model-0000"]),
    "a shard that is cut short": (_cut_shard, 2, ["cut short", "bytes", "model-0000"]),
    "a file of the index that is not there": (_name_another_file, 2, ["lacks 1 of its", "gone.safetensors"]),
    "another shape": (_change(lambda weight: weight[:-1].contiguous()), 2, ["layers.2.mlp.experts", "gate_up_proj"]),
    "another dtype": (_change(lambda weight: weight.to(torch.int8)), 2, ["as I8", UP]),
    "not a number": (_change(_not_a_number), 1, ["model.layers.2.mlp.experts", "expert 5", "up", "NaN"]),
    "an unknown quantisation": (_configure(quantization_config={"quant_method": "int3"}), 2, ["int3", "gptq"]),
    "a configuration of other sizes": (_configure(hidden_size=128), 2, ["(259, 64) on disk", "(259, 128)"]),
    "a configuration of more experts": (
        _configure(num_local_experts=16),
        2,
        ["(8, 64, 64) on disk and (16, 64, 64) by the configuration"],
    ),
    "a configuration that is none": (_cut_config, 2, ["config"]),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said_with_an_exit_code(kt: Kt, sharded: Path, what: str) -> None:
    damage, code, words = BAD[what]
    damage(sharded)
    result = kt("run", str(sharded), "--prompt", "abc", "--backend", "INT8", "--no-cache")
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert "Traceback" not in result.stderr
    assert "unexpected" not in result.stderr
    said = " ".join(result.stderr.split())
    assert [word for word in words if word not in said] == [], said


@pytest.mark.parametrize("what", [name for name in BAD if "configuration of more" not in name])
def test_the_converter_says_it_too_and_leaves_no_manifest(kt: Kt, sharded: Path, what: str, tmp_path: Path) -> None:
    BAD[what][0](sharded)
    out = tmp_path / "packed"
    result = kt("convert", "-i", str(sharded), "-o", str(out), "--method", "AMXINT8", "--threads", "1")
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("kt convert: ")
    assert "Traceback" not in result.stderr
    assert not (out / "kt_manifest.json").exists()
    assert not list(out.glob("*2.mlp*"))
