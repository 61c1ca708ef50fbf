"""The model in demo/model: plain transformers loads it, it is small, and it has learned English."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.accuracy_metrics import causal_logits, log_probabilities, perplexity, token_windows

DEMO = Path(__file__).resolve().parents[2] / "demo"
MODEL = DEMO / "model"
HELDOUT = (DEMO / "heldout.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    loaded.train(False)
    return loaded


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(MODEL)
    return loaded


@pytest.fixture(scope="module")
def windows(tokenizer: PreTrainedTokenizerBase) -> list[torch.Tensor]:
    ids = tokenizer(HELDOUT[:12_000], return_tensors="pt", verbose=False).input_ids[0]
    return token_windows(ids[:2048], 512)


def shipped_files() -> Iterator[Path]:
    return (path for path in DEMO.rglob("*") if path.is_file() and "cache" not in str(path.relative_to(DEMO)))


def test_everything_together_is_small() -> None:
    assert (MODEL / "model.safetensors").stat().st_size < 9_000_000
    assert sum(path.stat().st_size for path in shipped_files()) < 10_000_000


def test_config_reads_like_a_published_qwen3_moe() -> None:
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (config["num_experts"], config["num_experts_per_tok"], config["norm_topk_prob"]) == (8, 2, True)
    assert config["hidden_size"] % 64 == config["moe_intermediate_size"] % 64 == 0
    assert config["dtype"] == "bfloat16"


def test_model_has_a_few_million_parameters(model: PreTrainedModel) -> None:
    assert 4_000_000 < sum(parameter.numel() for parameter in model.parameters()) < 4_600_000


@pytest.mark.parametrize("text", [HELDOUT[:5000], "", " two  spaces\n\n\n", "naïve 東京 🙂 \t\x00", "<|endoftext|>"])
def test_tokenizer_round_trips_any_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_end_of_text_is_one_token(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    assert tokenizer("<|endoftext|>").input_ids == [tokenizer.eos_token_id] == [model.config.eos_token_id]


def test_a_conversation_is_its_messages(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "Emma was"}, {"role": "assistant", "content": "out."}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "Emma was\n\nout."


def test_perplexity_on_unseen_chapters(model: PreTrainedModel, windows: list[torch.Tensor]) -> None:
    value = perplexity(log_probabilities(causal_logits(model), windows), windows)
    # 30.6 on the whole file (demo/README.md); a model that learned nothing has 2048.
    assert 15 < value < 45


def test_tokens_spread_over_the_experts(model: PreTrainedModel, windows: list[torch.Tensor]) -> None:
    with torch.inference_mode():
        logits = model(input_ids=torch.stack(windows[:2]), output_router_logits=True).router_logits
    for layer in logits:
        # Some experts died in training (demo/README.md); a layer that leans on two or three would test nothing.
        assert len(layer.topk(2, dim=-1).indices.unique()) >= 6


def test_it_writes_words_of_the_language(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = tokenizer("It is a truth universally acknowledged, that", return_tensors="pt")
    continued = model.generate(**prompt, max_new_tokens=40, do_sample=False)  # type: ignore[operator]
    words = re.findall(r"[a-z]+", str(tokenizer.decode(continued[0])).lower())
    known = set(re.findall(r"[a-z]+", HELDOUT.lower()))
    assert sum(word in known for word in words) / len(words) > 0.85
