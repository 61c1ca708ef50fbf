"""The snippets of the published guides, run as printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kt_kernel.tier import family_of
from ktransformers import KTransformer
from tests.checkpoints.folders import make_checkpoint
from tests.checkpoints.gguf.writer import Wish, write_gguf
from tests.checkpoints.test_locate import make_cached
from tests.models import make_mixtral

PYTHON_API = """
from ktransformers import KTransformer

model = KTransformer.from_pretrained("Qwen3-Moe")
model.inject_expert_backend(
    layer_regex=r"^model\\.layers\\..*\\.mlp\\.experts$",
    backend="AMXBF16"  # or "AMXINT8"

)
model.generate("Hello, world!")
"""

YAML_RULE = r"""
- match:
    name: "^model\\.layers\\..*\\.mlp\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs:
      prefill_device: "cuda"
      prefill_op: "KExpertsTorch"
      generate_device: "cpu"
      generate_op: "KExpertsCPU"
      out_device: "cuda"
      backend: "AMXINT8"  # Use "AMXBF16" for BF16 quantization
"""

AMX_WRAPPER = """
import os
os.environ["CPUINFER_ENABLE_AMX"] = "ON"

from kt_kernel import AMXMoEWrapper

config = {
    "expert_num": 8,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "max_len": 1024,
    "num_experts_per_tok": 2,
    "swiglu_alpha": 0.0,
    "swiglu_limit": 0.0,
}
moe = AMXMoEWrapper(config)
moe.load_weights("path/to/weights")
output = moe.forward(input_tensor, expert_ids, weights)
"""

AVX2_WRAPPER = """
import os
os.environ["CPUINFER_ENABLE_AMX"] = "OFF"
os.environ["CPUINFER_ENABLE_AVX2"] = "ON"

from kt_kernel import AVX2MoEWrapper

config = {
    "expert_num": 8,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "max_len": 1024,
    "num_experts_per_tok": 2,
}
moe = AVX2MoEWrapper(config)
moe.load_weights("path/to/weights")
output = moe.forward(input_tensor, expert_ids, weights)
"""


def _run(snippet: str, **names: Any) -> dict[str, Any]:
    exec(compile(snippet, "<snippet>", "exec"), names)
    return names


@pytest.fixture
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippets write to os.environ: what they leave there is taken back."""
    for name in ("CPUINFER_ENABLE_AMX", "CPUINFER_ENABLE_AVX512", "CPUINFER_ENABLE_AVX2"):
        monkeypatch.setenv(name, "ON")


def _runs_on(model: Any) -> set[str]:
    return {r.details["backend"] for r in model.report.replacements}


def test_the_python_api_on_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "Qwen3-Moe", eos_token_id=None)
    monkeypatch.chdir(tmp_path)
    names = _run(PYTHON_API)
    assert _runs_on(names["model"]) == {"AMXBF16"}


def test_the_python_api_on_an_id_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(make_cached(tmp_path / "hub", "Qwen3-Moe"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    names = _run(PYTHON_API.replace("AMXBF16", "AMXINT8", 1))
    assert _runs_on(names["model"]) == {"AMXINT8"}


def test_the_rule_file_as_printed_on_a_host_without_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ktransformers import KTransformer

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    rules = tmp_path / "rules.yaml"
    rules.write_text(YAML_RULE)
    with caplog.at_level("WARNING", logger="ktransformers"):
        model = KTransformer.from_pretrained(make_checkpoint(tmp_path / "model"), rules=rules)
    assert [r.message for r in caplog.records if "cuda" in r.message] == [
        f"cuda was asked for, and this host has none (torch {torch.__version__}): the CPU takes its place."
    ]
    shipped = KTransformer.from_pretrained(tmp_path / "model", rules="Qwen3MoE-serve-amx.yaml")
    assert _runs_on(model) == _runs_on(shipped) == {"AMXINT8"}
    assert model.generate("Hello, world!", max_new_tokens=8, do_sample=False) == shipped.generate(
        "Hello, world!", max_new_tokens=8, do_sample=False
    )


@pytest.mark.usefixtures("_quiet_environment")
@pytest.mark.parametrize("snippet", [AMX_WRAPPER, AVX2_WRAPPER], ids=["amx", "avx2"])
def test_the_kernel_wrappers(snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The printed sizes ask for a gigabyte of floats; everything else is as printed.
    small = snippet.replace("2048", "64").replace("5120", "160")
    generator = torch.Generator().manual_seed(0)
    weights = {
        "gate_proj": torch.randn(8, 160, 64, generator=generator) / 8,
        "up_proj": torch.randn(8, 160, 64, generator=generator) / 8,
        "down_proj": torch.randn(8, 64, 160, generator=generator) / 12,
    }
    (tmp_path / "path/to/weights").mkdir(parents=True)
    save_file(weights, tmp_path / "path/to/weights/model.safetensors")
    monkeypatch.chdir(tmp_path)
    x = torch.randn(5, 64, generator=generator)
    ids = torch.tensor([[0, 7], [3, 4], [1, 2], [6, 5], [7, 0]])
    routing = torch.rand(5, 2, generator=generator)
    names = _run(small, input_tensor=x, expert_ids=ids, weights=routing)
    gate, up = (torch.einsum("eih,th->tei", weights[n].double(), x.double()) for n in ("gate_proj", "up_proj"))
    every = torch.einsum("ehi,tei->teh", weights["down_proj"].double(), torch.nn.functional.silu(gate) * up)
    wanted = (every[torch.arange(5)[:, None], ids] * routing[..., None].double()).sum(1)
    assert (names["output"].double() - wanted).norm() / wanted.norm() < 0.03
    assert snippet is AMX_WRAPPER or family_of(names["moe"].tier) in {"generic", "avx2"}


def test_a_gguf_model_needs_no_conversion(tmp_path: Path) -> None:
    """Its numbers are packed as they are, with the rule file of safetensors models."""
    write_gguf(make_mixtral(), tmp_path / "model.gguf", Wish(types={"": "Q8_0"}))
    rules = tmp_path / "rules.yaml"
    rules.write_text(YAML_RULE.replace('"AMXINT8"', "auto"))
    model = KTransformer.from_pretrained(tmp_path / "model.gguf", rules=rules)
    assert model.report is not None
    assert {entry.details["format"] for entry in model.report.replacements} == {"INT8_GROUPED"}
    assert model.generate("Hello, world!", max_new_tokens=4)
