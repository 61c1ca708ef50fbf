"""The module tree without weights: built from a configuration alone, faults named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config, Qwen3MoeConfig

from ktransformers.errors import CheckpointError
from ktransformers.injection import build_meta_model, experts_modules, walk
from tests.models import make_granite_moe, make_mixtral, make_qwen3_moe


def test_a_full_size_model_is_built_without_memory() -> None:
    model = build_meta_model(DeepseekV3Config())
    assert all(tensor.is_meta for tensor in [*model.parameters()])
    assert experts_modules(walk(model)) == [f"model.layers.{i}.mlp.experts" for i in range(3, 61)]


@pytest.mark.parametrize("make", [make_qwen3_moe, make_mixtral, make_granite_moe])
def test_the_tree_has_the_names_and_classes_of_the_real_model(make: Any) -> None:
    model = make()
    meta = build_meta_model(model.config)
    assert [(n, type(m)) for n, m in walk(meta)] == [(n, type(m)) for n, m in walk(model)]
    assert {n: p.shape for n, p in meta.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


def test_a_folder_needs_no_weight_files(tmp_path: Path) -> None:
    Qwen3MoeConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    assert type(build_meta_model(tmp_path)).__name__ == "Qwen3MoeForCausalLM"
    assert type(build_meta_model(str(tmp_path))).__name__ == "Qwen3MoeForCausalLM"


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"model_type": "no_such_model"}'])
def test_a_missing_or_damaged_configuration(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="no readable configuration"):
        build_meta_model(tmp_path)


def test_a_value_of_a_wrong_type_is_named_with_its_reason(tmp_path: Path) -> None:
    Qwen3MoeConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    written = (tmp_path / "config.json").read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": "two"')
    (tmp_path / "config.json").write_text(written)
    with pytest.raises(CheckpointError, match=r"'num_hidden_layers': .*expected int, got str"):
        build_meta_model(tmp_path)


def test_a_model_that_is_neither_here_nor_in_the_cache() -> None:
    with pytest.raises(CheckpointError, match=r"'nobody/nothing'.*nor a model in the local cache"):
        build_meta_model("nobody/nothing")


def test_a_configuration_that_contradicts_itself() -> None:
    match = "the configuration of qwen3_moe builds no model: 'no_such_activation' is not known"
    with pytest.raises(CheckpointError, match=match):
        build_meta_model(Qwen3MoeConfig(num_hidden_layers=1, hidden_act="no_such_activation"))


def test_a_model_that_is_not_a_plain_language_model() -> None:
    from transformers import Qwen3VLMoeConfig

    tiny: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_experts": 4, "moe_intermediate_size": 32}
    config = Qwen3VLMoeConfig(text_config={**tiny, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2})
    names = experts_modules(walk(build_meta_model(config)))
    assert names == [f"model.language_model.layers.{i}.mlp.experts" for i in range(2)]
