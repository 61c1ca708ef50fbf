"""Programs that know transformers and nothing of this package: they pass a `quantization_config`, or a loaded model."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.trainer_utils import validate_quantization_for_training

from ktransformers import KTransformersConfig
from ktransformers.errors import CheckpointError, RuleMatchError, UndoError
from ktransformers.operators.experts import KTransformersExperts
from tests import models
from tests.checkpoints.folders import make_checkpoint

DEMO = Path(__file__).parents[2] / "demo" / "model"
PROMPTS = ["Once upon a time", "The old man"]
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
IDS = torch.arange(20).view(1, 20)


def _load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=KTransformersConfig("auto", **options))


@pytest.fixture(scope="module")
def demo() -> Any:
    return _load(DEMO)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "checkpoint")


def _logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(IDS).logits
    return logits


def test_every_layer_of_the_demo_runs_on_the_kernel(demo: Any) -> None:
    operators = [m for m in demo.modules() if isinstance(m, KTransformersExperts)]
    assert len(operators) == demo.config.num_hidden_layers == len(demo.hf_quantizer.report.replacements)
    assert demo.quantization_method == "ktransformers"


def test_a_pipeline_writes_what_generate_writes(demo: Any, tokenizer: Any) -> None:
    ids = tokenizer(PROMPTS[0], return_tensors="pt")
    wanted = tokenizer.decode(demo.generate(**ids, **GREEDY)[0], skip_special_tokens=True)
    assert pipeline("text-generation", model=demo, tokenizer=tokenizer)(PROMPTS[0], **GREEDY) == [
        {"generated_text": wanted}
    ]
    loads: Any = {"quantization_config": KTransformersConfig("auto")}
    from_disk = pipeline("text-generation", model=str(DEMO), model_kwargs=loads)
    assert from_disk(PROMPTS[0], **GREEDY) == [{"generated_text": wanted}]


def test_left_padded_prompts_in_a_batch_go_on_as_they_do_alone(demo: Any, tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    together = demo.generate(**tokenizer(PROMPTS, return_tensors="pt", padding=True), **GREEDY)
    for prompt, row in zip(PROMPTS, together, strict=True):
        alone = demo.generate(**tokenizer(prompt, return_tensors="pt"), **GREEDY)[0]
        assert row[-GREEDY["max_new_tokens"] :].tolist() == alone[-GREEDY["max_new_tokens"] :].tolist()


def test_an_assistant_changes_no_token(demo: Any, tokenizer: Any) -> None:
    ids = tokenizer(PROMPTS[0], return_tensors="pt")
    assistant = AutoModelForCausalLM.from_pretrained(DEMO)
    assert torch.equal(demo.generate(**ids, **GREEDY, assistant_model=assistant), demo.generate(**ids, **GREEDY))


def test_an_evaluation_loop_gets_a_finite_loss(demo: Any, tokenizer: Any) -> None:
    validate_quantization_for_training(demo)  # `Trainer` asks, before it evaluates too
    ids = tokenizer(" ".join(PROMPTS), return_tensors="pt").input_ids
    demo.eval()
    with torch.no_grad():
        loss = demo(input_ids=ids, labels=ids).loss
    plain = AutoModelForCausalLM.from_pretrained(DEMO)
    with torch.no_grad():
        torch.testing.assert_close(loss, plain(input_ids=ids, labels=ids).loss, rtol=0.02, atol=0.02)


def test_a_dictionary_is_as_good_as_the_object(checkpoint: Path) -> None:
    config = {"quant_method": "ktransformers", "rules": "auto", "threads": 1}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=config)
    assert "1 thread" in model.hf_quantizer.report.replacements[0].summary
    with pytest.raises(TypeError, match="takes rules, keep_float"):
        AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config={**config, "rulez": "auto"})


def test_the_configuration_is_not_that_of_a_quantised_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    model = _load(checkpoint)
    assert not hasattr(model.config, "quantization_config")
    model.config.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == (checkpoint / "config.json").read_text()


def test_without_floats_saving_is_refused_and_says_how_it_is_done(checkpoint: Path, tmp_path: Path) -> None:
    model = _load(checkpoint)
    assert not model.hf_quantizer.is_serializable()
    with pytest.raises(CheckpointError, match="keep_float=True"):
        model.save_pretrained(tmp_path)
    with pytest.raises(UndoError, match=r"were freed.*KTransformersConfig\(keep_float=True\)"):
        model.dequantize()
    assert not any(".experts." in name for name in model.state_dict())


def test_with_floats_saving_writes_the_checkpoint_that_was_loaded(checkpoint: Path, tmp_path: Path) -> None:
    model = _load(checkpoint, keep_float=True)
    assert model.hf_quantizer.is_serializable()
    model.save_pretrained(tmp_path)
    again, wanted = AutoModelForCausalLM.from_pretrained(tmp_path), models.make_qwen3_moe()
    assert torch.equal(_logits(again), _logits(wanted))
    assert "quantization" not in (tmp_path / "config.json").read_text()


def test_dequantize_gives_the_plain_model_back(checkpoint: Path) -> None:
    model = _load(checkpoint, keep_float=True)
    plain = model.dequantize()
    assert torch.equal(_logits(plain), _logits(models.make_qwen3_moe()))
    assert not hasattr(plain, "hf_quantizer")
    assert torch.equal(_logits(pickle.loads(pickle.dumps(plain))), _logits(plain))
    assert all(parameter.requires_grad for parameter in plain.parameters())


def test_casts_and_copies_work_as_for_any_model(checkpoint: Path) -> None:
    model = _load(checkpoint)
    wanted = _logits(model)
    assert torch.equal(_logits(copy.deepcopy(model)), wanted)
    assert _logits(model.bfloat16()).dtype == torch.bfloat16
    assert _logits(model.float()).dtype == torch.float32


def test_rule_errors_come_as_they_are_and_before_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"no weights at all")
    config = KTransformersConfig([{"match": {"name": "nothing"}, "replace": {"class": "default"}}])
    with pytest.raises(RuleMatchError, match="matches no module"):
        AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=config)


def test_loading_lists_no_expert_as_unexpected(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = KTransformersConfig("auto")
    model, info = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=config, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model._keys_to_ignore_on_load_unexpected == plain._keys_to_ignore_on_load_unexpected
