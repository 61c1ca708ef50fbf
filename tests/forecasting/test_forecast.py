"""What is foretold is what comes: the same bytes once the model is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ktransformers import Forecast, KTransformer, forecast
from ktransformers.errors import DoesNotFitError, RuleMatchError
from ktransformers.forecasting import compose
from ktransformers.injection import apply_plan, build_meta_model, make_plan
from ktransformers.memory import MemoryLimit
from tests.checkpoints.quantised import CONFIGS, make_pair
from tests.injection.rules_of import make_rule
from tests.models import (
    make_deepseek_v3,
    make_gpt_oss,
    make_granite_moe,
    make_mixtral,
    make_olmoe,
    make_qwen2_moe,
    make_qwen3_moe,
)

_MODELS = [
    make_deepseek_v3,
    make_gpt_oss,
    make_granite_moe,
    make_mixtral,
    make_olmoe,
    make_qwen2_moe,
    make_qwen3_moe,
]
_IDS = torch.arange(20)[None]


def _rules(backend: str = "INT8", **kwargs: Any) -> list[dict[str, Any]]:
    return [make_rule(r"\.experts$", "KTransformersExperts", backend=backend, threads=1, **kwargs)]


@pytest.mark.parametrize("method", sorted(CONFIGS))
@pytest.mark.parametrize("backend", ["auto", "INT4", "INT8"])
def test_experts_of_a_quantised_checkpoint_count_as_what_packs_them(tmp_path: Path, method: str, backend: str) -> None:
    quantised, _ = make_pair(tmp_path, method)
    told = forecast(quantised, _rules(backend))
    loaded = KTransformer.from_pretrained(quantised, rules=_rules(backend))
    assert loaded.report is not None
    (packed,) = (holding for holding in told.holdings if holding.what == "packed experts")
    assert packed.nbytes == sum(int(entry.details["bytes"]) for entry in loaded.report.replacements)
    assert {packed.format} == {entry.details["format"] for entry in loaded.report.replacements}
    own = {"fp8": "FP8", "gptq-8": None}.get(method, "INT4")
    assert any("nothing is lost" in note for note in told.quantisation) == (backend in ("auto", own))


def _foretold(model: Any, rules: list[dict[str, Any]], **options: Any) -> Forecast:
    return forecast(build_meta_model(model.config), rules, **options)


@pytest.mark.parametrize("make", _MODELS)
@pytest.mark.parametrize("backend", ["INT8", "BF16"])
def test_weights_and_cache_are_what_the_loaded_model_has(make: Any, backend: str) -> None:
    model = make()
    foretold = _foretold(model, _rules(backend), context=_IDS.shape[1])
    report = apply_plan(make_plan(_rules(backend), model), model, keep_float=False)
    packed, *others = foretold.holdings
    assert packed.format == backend
    assert packed.nbytes == sum(int(r.details["bytes"]) for r in report.replacements)
    assert packed.modules == len(report.replacements)
    assert foretold.lines() == report.lines()
    assert sum(h.nbytes for h in others) == sum(parameter.nbytes for parameter in model.parameters())
    with torch.no_grad():
        cache = model(_IDS, use_cache=True).past_key_values
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    # Sliding windows count their tokens in a tensor of 8 bytes.
    assert abs(foretold.cache - sum(t.nbytes for t in tensors)) <= 8 * len(cache.layers)


def test_a_token_reads_its_own_experts_one_row_of_the_embedding_and_all_the_rest() -> None:
    model = make_qwen3_moe(tie_word_embeddings=False)
    foretold = _foretold(model, _rules())
    packed, others = foretold.holdings
    config = model.config
    assert packed.read_per_token * config.num_experts == packed.nbytes * config.num_experts_per_tok
    embedding = model.model.embed_tokens.weight
    assert others.nbytes - others.read_per_token == embedding.nbytes - embedding.nbytes // len(embedding)


def test_a_tied_head_is_held_once_and_read_whole() -> None:
    apart, tied = (_foretold(make_qwen3_moe(tie_word_embeddings=tie), _rules()) for tie in (False, True))
    embedding = make_qwen3_moe().model.embed_tokens.weight
    assert apart.holdings[1].nbytes - tied.holdings[1].nbytes == embedding.nbytes
    assert apart.read_per_token - tied.read_per_token == embedding.nbytes // len(embedding)


def test_experts_that_stay_with_transformers_are_read_by_their_share() -> None:
    model = make_qwen3_moe()
    foretold = _foretold(model, [make_rule(r"layers\.1\.mlp\.experts$", "KTransformersExperts", backend="INT8")])
    left = model.model.layers[2].mlp.experts
    floats = sum(parameter.nbytes for parameter in left.parameters())
    whole = _foretold(model, _rules())
    assert foretold.holdings[1].nbytes - whole.holdings[1].nbytes == floats
    share = floats * model.config.num_experts_per_tok // model.config.num_experts
    assert foretold.holdings[1].read_per_token - whole.holdings[1].read_per_token == share
    assert "model.layers.2.mlp.experts: no rule matches, transformers' own" in foretold.lines()


def test_experts_in_torch_keep_their_floats() -> None:
    model = make_qwen3_moe()
    (torch_experts, _) = _foretold(model, _rules(generate_op="KExpertsTorch")).holdings
    floats = sum(p.nbytes for n, p in model.named_parameters() if ".experts." in n)
    assert torch_experts.nbytes == floats
    assert torch_experts.format == "float32"


def test_nothing_but_the_configuration_is_needed(tmp_path: Path) -> None:
    config = make_qwen3_moe().config
    config.dtype = "bfloat16"
    config.save_pretrained(tmp_path)
    foretold = forecast(tmp_path, "Qwen3MoE", context=100_000)
    assert foretold.holdings[1].format == "bfloat16"
    assert foretold.context == config.max_position_embeddings


def test_the_type_of_the_numbers_is_that_on_disk_where_the_configuration_does_not_say(tmp_path: Path) -> None:
    model = make_qwen3_moe().to(torch.float16)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert forecast(tmp_path, "Qwen3MoE").holdings[1].format == "float16"


def test_rules_that_do_not_fit_the_model_are_the_same_error_as_when_loading() -> None:
    with pytest.raises(RuleMatchError, match="matches no module"):
        _foretold(make_qwen3_moe(), [make_rule("nothing", "KTransformersExperts")])


def test_an_operator_of_somebody_else_is_counted_as_its_original_and_said() -> None:
    model = make_qwen3_moe()
    foretold = _foretold(model, [make_rule(r"\.experts$")])
    assert sum(h.nbytes for h in foretold.holdings) == sum(parameter.nbytes for parameter in model.parameters())
    assert "PassThrough will hold cannot be told" in foretold.approximate[0]


def test_the_ceiling_is_bandwidth_over_bytes() -> None:
    foretold = _foretold(make_qwen3_moe(), _rules(), bandwidth=1e9)
    assert foretold.decode_ceiling == pytest.approx(1e9 / foretold.read_per_token)
    assert _foretold(make_qwen3_moe(), _rules()).decode_ceiling is None


def test_what_does_not_fit_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [MemoryLimit("the cgroup /sys/fs/cgroup/job", 2 << 30, 10 << 20), MemoryLimit("this machine", 9, 1 << 40)]
    monkeypatch.setattr(compose, "memory_limits", lambda: limits)
    foretold = _foretold(make_qwen3_moe(), _rules("BF16"))
    assert not foretold.fits
    assert foretold.shortfalls() == [foretold.shortfalls()[0]]
    with pytest.raises(DoesNotFitError) as caught:
        foretold.raise_unless_fits()
    for part in ("the cgroup /sys/fs/cgroup/job leaves 10 MiB (of 2.0 GiB)", "are missing", "packed experts in BF16"):
        assert part in str(caught.value)
    assert "as INT8 the experts would take about half" in str(caught.value)
    assert "does not fit" in str(foretold)


def test_what_fits_says_what_it_needs_and_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "memory_limits", lambda: [MemoryLimit("this machine", 1 << 41, 1 << 40)])
    foretold = _foretold(make_qwen3_moe(), _rules())
    foretold.raise_unless_fits()
    assert "this machine leaves 1024.0 GiB" in str(foretold).splitlines()[-1]
    plain = json.loads(json.dumps(foretold.as_dict()))
    assert plain["fits"] is True
    assert plain["needed"] == foretold.peak - foretold.baseline
    assert plain["layers"][0]["tier"]


def test_the_model_is_as_it_was() -> None:
    meta = build_meta_model(make_qwen3_moe().config)
    before = dict(meta.named_modules())
    hooks = [len(module._forward_pre_hooks) for module in meta.modules()]
    forecast(meta, _rules())
    assert dict(meta.named_modules()) == before
    assert [len(module._forward_pre_hooks) for module in meta.modules()] == hooks
    assert not any("forward" in module.__dict__ for module in meta.modules() if isinstance(module, nn.Module))
