"""Whole models: logits with injected experts against transformers' eager path, and exactly its own after undo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import ktransformers
from ktransformers import KTransformer
from ktransformers.operators.experts import KTransformersExperts
from tests import models

BUILDERS = [
    models.make_qwen3_moe,
    models.make_qwen2_moe,
    models.make_mixtral,
    models.make_deepseek_v3,
    models.make_olmoe,
    models.make_granite_moe,
    models.make_gpt_oss,
]
# Relative L2 error of a token's logits, for the median token: a router on the fence may send single tokens elsewhere.
TOLERANCE = {"BF16": 0.01, "INT8": 0.03}


def _rules(backend: str, **kwargs: Any) -> list[dict[str, Any]]:
    experts = {"class": "KTransformersExperts", "kwargs": {"backend": backend, **kwargs}}
    return [{"match": {"name": r"\.experts$"}, "replace": experts}]


def _make_eager(build: Callable[..., Any], **overrides: Any) -> Any:
    model = build(**overrides)
    model.set_experts_implementation("eager")
    return model


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(3))


def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(ids).logits
    return logits


@pytest.mark.parametrize("backend", ["BF16", "INT8"])
@pytest.mark.parametrize("build", BUILDERS)
def test_logits_agree_with_eager_and_equal_it_after_undo(build: Callable[..., Any], backend: str) -> None:
    model, ids = _make_eager(build), _tokens(2, 48)
    eager = _logits(model, ids)
    parameters = [id(parameter) for parameter in model.parameters()]
    report = ktransformers.inject(model, _rules(backend))
    assert len(report.replacements) == len(models.moe_layers(model))
    ours = _logits(model, ids)
    errors = (ours - eager).norm(dim=-1) / eager.norm(dim=-1)
    assert errors.median() < TOLERANCE[backend]
    # The greedy token is the same wherever the model is surer of it than the tolerance.
    best, second = eager.topk(2, dim=-1).values.unbind(-1)
    sure = (best - second) > 4 * (ours - eager).abs().amax(dim=-1)
    assert sure.float().mean() > 0.3
    assert torch.equal(ours.argmax(-1)[sure], eager.argmax(-1)[sure])
    report.undo()
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert torch.equal(_logits(model, ids), eager)


@pytest.mark.parametrize("keep_float", [True, False])
@pytest.mark.parametrize("build", [*BUILDERS, models.make_deepseek_v2, models.make_glm4_moe, models.make_qwen3_next])
def test_with_experts_and_linears_on_the_kernel_logits_and_greedy_tokens_agree(
    build: Callable[..., Any], keep_float: bool
) -> None:
    model, ids = _make_eager(build), _tokens(2, 32)
    eager = _logits(model, ids)
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    report = ktransformers.inject(model, "cpu-only", keep_float=keep_float)
    taken = [r.name for r in report.replacements if r.new_class == "KTransformersLinear"]
    assert set(linears) - set(taken) == {name for name in linears if name.endswith("shared_expert_gate")}
    ours = _logits(model, ids)
    errors = (ours - eager).norm(dim=-1) / eager.norm(dim=-1)
    # bf16 weights and inputs in every product of the model, not in its experts alone. Qwen3-Next carries a state from
    # token to token, which gathers more of it: transformers' own bf16 is off by 3.1 % there.
    assert errors.median() < (0.03 if build is models.make_qwen3_next else 0.02)
    best, second = eager.topk(2, dim=-1).values.unbind(-1)
    sure = (best - second) > 4 * (ours - eager).abs().amax(dim=-1)
    assert sure.float().mean() > 0.1
    assert torch.equal(ours.argmax(-1)[sure], eager.argmax(-1)[sure])
    if keep_float:
        report.undo()
        assert torch.equal(_logits(model, ids), eager)


def test_a_head_tied_to_the_embedding_leaves_it_whole(tmp_path: Path) -> None:
    model, ids = _make_eager(models.make_qwen3_moe, tie_word_embeddings=True), _tokens(1, 24)
    eager, embedding = _logits(model, ids), model.get_input_embeddings().weight
    assert model.lm_head.weight is embedding
    values = embedding.detach().clone()
    model.save_pretrained(tmp_path / "before")
    for keep_float in (True, False):
        report = ktransformers.inject(model, "cpu-only", keep_float=keep_float)
        assert model.get_input_embeddings().weight is embedding
        assert torch.equal(embedding, values)
        ours = _logits(model, ids)
        assert ((ours - eager).norm(dim=-1) / eager.norm(dim=-1)).median() < 0.02
        if keep_float:
            model.save_pretrained(tmp_path / "injected")
            report.undo()
            assert model.lm_head.weight is embedding
            assert torch.equal(_logits(model, ids), eager)
    files = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("before", "injected")]
    assert files[0] == files[1]


def test_a_checkpoint_loads_with_experts_and_linears_on_the_kernel(tmp_path: Path) -> None:
    model, ids = _make_eager(models.make_qwen3_moe, tie_word_embeddings=True), _tokens(1, 24)
    folder = models.save_with_tokenizer(model, tmp_path / "model")
    ktransformers.inject(model, "cpu-only")
    wanted = _logits(model, ids)
    for cache in (False, tmp_path / "cache", tmp_path / "cache"):  # the third one finds its experts there
        loaded = KTransformer.from_pretrained(folder, rules="cpu-only", threads=1, cache=cache)
        assert loaded.report is not None
        assert len(loaded.report.replacements) == 2 + 3 * 4 + 3 + 1
        assert torch.equal(_logits(loaded.model, ids), wanted)
        assert all("1 thread " in r.summary for r in loaded.report.replacements)


def test_routers_choose_as_before_with_correction_biases_of_five() -> None:
    model, ids = _make_eager(models.make_deepseek_v3), _tokens(1, 32)
    gates = {n: m for n, m in model.named_modules() if n.endswith("mlp.gate")}
    for gate in gates.values():
        gate.e_score_correction_bias.copy_(torch.tensor([5.0, -5, 5, -5, -5, 5, -5, 5]))
    seen: list[Any] = []
    for gate in gates.values():
        gate.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    before = {n: {k: (t.clone(), t.dtype) for k, t in gate.state_dict().items()} for n, gate in gates.items()}
    eager = _logits(model, ids)
    untouched = seen.copy()
    seen.clear()
    ktransformers.inject(model, _rules("BF16"))
    ours = _logits(model, ids)
    assert ((ours - eager).norm(dim=-1) / eager.norm(dim=-1)).median() < TOLERANCE["BF16"]
    for name, gate in gates.items():
        assert model.get_submodule(name) is gate
        state = gate.state_dict()
        assert all(torch.equal(state[k], t) and state[k].dtype == d for k, (t, d) in before[name].items())
    # The first MoE layer's router sees the very same input, so it has to choose the very same.
    assert torch.equal(untouched[0][0], seen[0][0])
    for mine, theirs in zip(seen[0][1], untouched[0][1], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_generate_calls_our_experts_at_every_layer_and_step(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _make_eager(models.make_qwen3_moe)
    ktransformers.inject(model, _rules("INT8"))
    model.set_experts_implementation(implementation)
    calls: list[tuple[str, int]] = []
    forward = KTransformersExperts.forward

    def counted(self: KTransformersExperts, *args: torch.Tensor) -> torch.Tensor:
        calls.append((self.key, len(args[0])))
        return forward(self, *args)

    monkeypatch.setattr(KTransformersExperts, "forward", counted)
    prompt = _tokens(1, 7)
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    layers = models.moe_layers(model)
    assert calls == [(name, tokens) for tokens in [7, *[1] * 7] for name in layers]


def test_a_batch_in_any_composition_gives_the_same_bits() -> None:
    model = _make_eager(models.make_mixtral)
    ktransformers.inject(model, _rules("INT8"))
    experts = model.get_submodule(models.moe_layers(model)[0])
    hidden = torch.randn(9, 64)
    ids, weights = torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
    together = experts(hidden, ids, weights)
    alone = torch.cat([experts(hidden[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(9)])
    assert torch.equal(together, alone)


def test_long_prompts_stream_float_weights_and_answers_stay_exact() -> None:
    model, ids = _make_eager(models.make_qwen3_moe), _tokens(1, 24)
    eager = _logits(model, ids)
    prefill = {"prefill_op": "KExpertsTorch", "prefill_device": "cpu", "prefill_threshold": 16}
    report = ktransformers.inject(model, _rules("INT8", **prefill), keep_float=False)
    assert report.floats_kept  # they are streamed from
    torch.testing.assert_close(_logits(model, ids), eager, rtol=1e-4, atol=1e-5)
    short = ids[:, :8]
    assert not torch.allclose(_logits(model, short), eager[:, :8], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_model_may_change_its_dtype_after_injection(dtype: torch.dtype) -> None:
    model, ids = _make_eager(models.make_qwen3_moe), _tokens(1, 24)
    eager = _logits(model, ids)
    report = ktransformers.inject(model, _rules("BF16"))
    narrow = _logits(model.to(dtype), ids)
    assert narrow.dtype == dtype
    assert ((narrow.float() - eager).norm(dim=-1) / eager.norm(dim=-1)).median() < 0.03
    report.undo()
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert _logits(model, ids).dtype == dtype


def test_without_rules_the_models_type_chooses_them() -> None:
    model = _make_eager(models.make_qwen3_moe)
    report = ktransformers.inject(model)
    assert [r.name for r in report.replacements] == models.moe_layers(model)


def test_threads_reach_the_kernel_unless_the_rule_says_otherwise() -> None:
    model = _make_eager(models.make_qwen3_moe)
    report = ktransformers.inject(model, _rules("INT8"), threads=1)
    assert "1 thread" in str(report)
    report.undo()
    assert "2 threads" in str(ktransformers.inject(model, _rules("INT8", threads=2), threads=1))
