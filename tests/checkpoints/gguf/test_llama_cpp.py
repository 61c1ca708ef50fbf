"""What is read here is what llama.cpp writes: headers of files that its own converter made of the models in
`test_architectures` (ggml 0.25.3, November 2026) against those of the writer that the other tests use.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.checkpoints.gguf.test_architectures import MODELS
from tests.checkpoints.gguf.writer import write_gguf

THEIRS: dict[str, Any] = json.loads((Path(__file__).parent / "llama_cpp_headers.json").read_text(encoding="utf-8"))

# What the converter leaves out where it is so anyway, and older ones wrote.
SAID_BY_US = {"deepseek2": {"expert_gating_func": ["UINT32", 1], "expert_weights_norm": ["BOOL", False]}}


@pytest.mark.parametrize("kind", THEIRS)
def test_files_of_the_tests_have_the_header_of_llama_cpp_s(kind: str, tmp_path: Path) -> None:
    write_gguf(MODELS[kind](), tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    name = THEIRS[kind]["architecture"]
    assert reader.fields["general.architecture"].contents() == name
    ours = {
        key.removeprefix(f"{name}."): [field.types[0].name, _rounded(field.contents())]
        for key, field in reader.fields.items()
        if key.startswith(f"{name}.")
    }
    more = {key: value for key, value in ours.items() if key not in THEIRS[kind]["metadata"]}
    assert more.items() <= SAID_BY_US.get(name, {}).items()
    assert {key: ours.get(key) for key in THEIRS[kind]["metadata"]} == THEIRS[kind]["metadata"]
    tensors = {tensor.name: [int(side) for side in tensor.shape[::-1]] for tensor in reader.tensors}
    assert tensors == THEIRS[kind]["tensors"]


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
