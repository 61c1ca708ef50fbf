"""A model whose experts were packed while it loaded computes what one does that was loaded whole and then injected."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import ktransformers
from ktransformers import KTransformer, KTransformersConfig
from ktransformers.checkpoints import CheckpointSource, parts
from ktransformers.operators.experts import KTransformersExperts
from tests import models
from tests.checkpoints.folders import make_checkpoint, rewrite
from tests.checkpoints.quantised import make_pair

RULES: list[dict[str, Any]] = [
    {"match": {"name": r"\.experts$"}, "replace": {"class": "KTransformersExperts", "kwargs": {"backend": "INT8"}}}
]
IDS = torch.arange(20).view(1, 20)
BUILDERS = [
    models.make_qwen3_moe,
    models.make_qwen2_moe,
    models.make_deepseek_v3,
    models.make_mixtral,
    models.make_olmoe,
    models.make_granite_moe,
    models.make_gpt_oss,
]


@pytest.fixture(params=[1, parts.PART_BYTES], ids=["expert by expert", "whole layers"])
def part_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(parts, "PART_BYTES", request.param)
    return int(request.param)


def _logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(IDS).logits
    return logits


def _streamed(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=KTransformersConfig(RULES, **options))


def _wanted(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    ktransformers.inject(model, RULES)
    return _logits(model)


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.usefixtures("part_bytes")
def test_every_spelling_on_disk_gives_the_same_bits(build: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    model = _streamed(tmp_path)
    assert torch.equal(_logits(model), _wanted(tmp_path))
    assert not model.hf_quantizer.report.floats_kept
    assert all(p.is_meta for m in _operators(model) for p in m.orig_module.parameters())


@pytest.mark.usefixtures("part_bytes")
def test_experts_that_are_stacked_on_disk(tmp_path: Path) -> None:
    model = models.make_mixtral()
    model.save_pretrained(tmp_path)
    wanted = _wanted(tmp_path)
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    assert torch.equal(_logits(_streamed(tmp_path)), wanted)


@pytest.mark.usefixtures("part_bytes")
def test_a_checkpoint_of_the_bare_model_without_the_head_s_prefix(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    wanted = _wanted(tmp_path)
    rewrite(tmp_path, lambda name: name.removeprefix("model."))
    assert torch.equal(_logits(_streamed(tmp_path)), wanted)


@pytest.mark.parametrize("kind", ["float", "fp8"])
@pytest.mark.usefixtures("part_bytes")
def test_what_was_read_goes_when_it_is_packed_and_no_more_than_one_part_is_read_ahead(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pair(tmp_path, "fp8", num_hidden_layers=6)
    there: weakref.WeakSet[Any] = weakref.WeakSet()
    counts: list[int] = []
    read = CheckpointSource._read

    def counted(self: CheckpointSource, *job: Any) -> Any:
        result = read(self, *job)
        there.add(result[1])
        counts.append(len(there))
        return result

    monkeypatch.setattr(CheckpointSource, "_read", counted)
    model = KTransformer.from_pretrained(tmp_path / kind, RULES).model
    assert len(counts) >= len(_operators(model)) == 5
    assert max(counts) <= 2
    assert len(there) == 0


def test_kept_floats_are_the_checkpoint_s(tmp_path: Path, part_bytes: int) -> None:
    assert part_bytes
    original = models.make_gpt_oss()
    original.save_pretrained(tmp_path)
    model = _streamed(tmp_path, keep_float=True)
    assert model.hf_quantizer.report.floats_kept
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in original.state_dict().items())


def test_experts_that_compute_in_torch_too_get_their_floats(tmp_path: Path, part_bytes: int) -> None:
    assert part_bytes
    make_checkpoint(tmp_path)
    kwargs = {"backend": "INT8", "prefill_op": "KExpertsTorch", "prefill_device": "cpu", "prefill_threshold": 4}
    rules = [{"match": {"name": r"\.experts$"}, "replace": {"class": "KTransformersExperts", "kwargs": kwargs}}]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=KTransformersConfig(rules))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(_logits(model), _logits(plain))
    assert model.hf_quantizer.report.floats_kept


def test_weights_are_packed_in_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    config = KTransformersConfig(RULES)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=config)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ktransformers.inject(plain, RULES)
    assert torch.equal(_logits(model), _logits(plain))


def test_layers_that_no_rule_names_are_loaded_by_transformers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    rules = [{"match": {"name": r"layers\.1\..*\.experts$"}, "replace": {"class": "KTransformersExperts"}}]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=KTransformersConfig(rules))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    name = "model.layers.2.mlp.experts.down_proj"
    assert torch.equal(model.get_parameter(name), plain.get_parameter(name))
    assert [m.key for m in _operators(model)] == ["model.layers.1.mlp.experts"]


def test_operators_that_know_nothing_of_streaming_get_a_loaded_module(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    rules: list[dict[str, Any]] = [
        {"match": {"name": r"layers\.1\..*\.experts$"}, "replace": {"class": "tests.loading.operators.Doubled"}},
        *RULES,
    ]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=KTransformersConfig(rules))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    ktransformers.inject(plain, rules)
    assert torch.equal(_logits(model), _logits(plain))
    assert len(model.hf_quantizer.report.replacements) == 2


@pytest.mark.parametrize("arrangement", ["one tensor a file", "no index", "one file of another name"])
def test_any_arrangement_of_files(tmp_path: Path, arrangement: str) -> None:
    folder = make_checkpoint(tmp_path / "model")
    wanted = _logits(KTransformer.from_pretrained(folder, RULES).model)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: {name: tensor} for name, tensor in tensors.items()}
    if arrangement == "one file of another name":
        files = {"weights": tensors}
    for number, content in enumerate(files.values()):
        save_file(content, folder / f"part-{number}.safetensors")
    if arrangement == "one tensor a file":
        index = {name: f"part-{number}.safetensors" for number, name in enumerate(files)}
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    model = KTransformer.from_pretrained(folder, RULES)
    assert torch.equal(_logits(model.model), wanted)
    assert model.model.name_or_path == str(folder)
    plain = KTransformer.from_pretrained(folder)
    assert torch.equal(_logits(plain.model), _logits(models.make_qwen3_moe()))


def test_a_pickled_checkpoint_is_loaded_whole_and_then_injected(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    wanted = _wanted(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(_logits(_streamed(tmp_path)), wanted)


def _operators(model: torch.nn.Module) -> list[KTransformersExperts]:
    return [module for module in model.modules() if isinstance(module, KTransformersExperts)]
