"""`kt plan`, and what `kt run` does about a model that does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import kt_kernel
from ktransformers.forecasting import compose
from ktransformers.memory import MemoryLimit
from tests.cli.conftest import Kt


@pytest.fixture
def weightless(moe_folder: str, tmp_path: Path) -> str:
    folder = tmp_path / "weightless"
    shutil.copytree(moe_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return str(folder)


@pytest.fixture
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "memory_limits", lambda: [MemoryLimit("the cgroup /job", 1 << 30, 1 << 20)])


def test_the_plan_names_layers_formats_reads_and_the_ceiling(
    kt: Kt, weightless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kt_kernel, "read_bandwidth", lambda _: 10e9)
    result = kt("plan", weightless, "--backend", "INT8", "--threads", "1")
    assert result.exit_code == 0, result.stderr
    tier = kt_kernel.cpu_info().chosen["INT8"]
    assert f"asked for INT8, runs INT8 on {tier}, 1 thread" in result.stdout
    assert "packed experts  cpu     INT8" in result.stdout
    assert "other weights   cpu     float32" in result.stdout
    assert "INT8: quantised once, from the checkpoint's float32" in result.stdout
    assert "for the first 1,000 tokens" in result.stdout
    assert "10.0 GB/s were measured" in result.stdout
    assert "fits: " in result.stdout


def test_the_plan_as_json_has_the_same_numbers(kt: Kt, weightless: str) -> None:
    result = kt("plan", weightless, "--json", "--no-measure", "--context", "50", "--rules", "Qwen3MoE-serve-amx")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["rules"] == "Qwen3MoE-serve-amx.yaml"
    assert found["context"] == 50
    assert found["decode_ceiling"] is None
    assert found["weights"][0]["format"] == "INT8"
    assert found["peak"] == max(found["loading"], found["running"])


def test_verbose_names_every_layer(kt: Kt, weightless: str) -> None:
    told = kt("plan", weightless, "--no-measure", "--verbose").stdout
    assert "model.layers.1.mlp.experts: rule 1" in told
    assert "model.layers.2.mlp.experts: rule 1" in told


@pytest.mark.usefixtures("_little_memory")
def test_a_model_that_does_not_fit_has_an_exit_code_of_its_own(kt: Kt, weightless: str) -> None:
    result = kt("plan", weightless, "--no-measure")
    assert result.exit_code == 3
    assert "the cgroup /job leaves 1.0 MiB (of 1.0 GiB)" in result.stdout
    assert "does not fit" in result.stderr


@pytest.mark.usefixtures("_little_memory")
def test_a_run_that_would_not_fit_is_refused_before_weights_are_read(kt: Kt, weightless: str) -> None:
    result = kt("run", weightless, "--prompt", "abc")
    assert result.exit_code == 3
    assert "error: the model does not fit: " in result.stderr
    assert "`--force` goes on all the same" in result.stderr
    assert result.stdout == ""


@pytest.mark.usefixtures("_little_memory")
@pytest.mark.parametrize(
    ("command", "later"),
    [(("chat",), "no chat template"), (("serve", "--port", "0", "--max-context", "600"), "more than the 512")],
    ids=["chat", "serve"],
)
def test_chat_and_serve_look_at_memory_too(kt: Kt, moe_folder: str, command: tuple[str, ...], later: str) -> None:
    if command[0] == "serve":
        pytest.importorskip("openai", reason="the server needs the packages of ktransformers[serve]")
    refused = kt(command[0], moe_folder, *command[1:])
    assert refused.exit_code == 3
    assert "`--force` goes on all the same" in refused.stderr
    forced = kt(command[0], moe_folder, *command[1:], "--force")
    assert "warning: the model does not fit: " in forced.stderr
    assert later in forced.stderr


@pytest.mark.usefixtures("_little_memory")
def test_force_goes_on_with_a_warning(kt: Kt, moe_folder: str) -> None:
    result = kt("run", moe_folder, "--prompt", "abc", "--max-new-tokens", "2", "--force")
    assert result.exit_code == 0, result.stderr
    assert "warning: the model does not fit: " in result.stderr
    assert "speed: " in result.stderr


def test_a_plan_for_a_model_that_is_not_there(kt: Kt, tmp_path: Path) -> None:
    result = kt("plan", str(tmp_path / "absent"), "--no-measure")
    assert result.exit_code == 2
    assert "there is no model" in result.stderr
