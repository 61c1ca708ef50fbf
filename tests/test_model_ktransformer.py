"""`KTransformer`: from a folder or the cache to text, with experts changed layer by layer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ktransformers
from ktransformers import KTransformer
from ktransformers.errors import CheckpointError, InjectionError, RuleMatchError, UndoError
from ktransformers.operators.experts import KTransformersExperts
from tests import models
from tests.checkpoints.folders import make_checkpoint, rewrite

EXPERTS = r"^model\.layers\..*\.mlp\.experts$"
PROMPT = "Hello, world!"
INT8_RULES: list[dict[str, Any]] = [
    {"match": {"name": EXPERTS}, "replace": {"class": "KTransformersExperts", "kwargs": {"backend": "INT8"}}}
]
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"))


def _backends(model: KTransformer) -> dict[str, str]:
    modules = model.model.named_modules()
    return {n: m.describe()["backend"] for n, m in modules if isinstance(m, KTransformersExperts)}


def _logits(model: KTransformer) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model.model(torch.arange(20).view(1, 20)).logits
    return logits


def test_without_rules_it_is_the_plain_model(checkpoint: Path) -> None:
    model = KTransformer.from_pretrained(checkpoint)
    with torch.no_grad():
        assert torch.equal(_logits(model), models.make_qwen3_moe()(torch.arange(20).view(1, 20)).logits)
    assert model.report is None
    assert "transformers" in repr(model)


def test_text_is_the_continuation_only_and_the_stream_is_the_same(checkpoint: Path) -> None:
    model = KTransformer.from_pretrained(checkpoint, rules="auto")
    text = model.generate(PROMPT, **GREEDY)
    assert text
    assert not text.startswith(PROMPT)
    assert "".join(model.stream(PROMPT, **GREEDY)) == text
    assert "".join(model.generate(PROMPT, stream=True, **GREEDY)) == text
    ids = model.tokenizer(PROMPT, return_tensors="pt")  # type: ignore[misc]
    output = model.model.generate(**ids, **GREEDY)  # type: ignore[operator]
    assert model.tokenizer.decode(output[0, len(PROMPT) :], skip_special_tokens=True) == text  # type: ignore[union-attr]


def test_rules_are_applied_and_floats_freed(checkpoint: Path) -> None:
    model = KTransformer.from_pretrained(checkpoint, rules="Qwen3MoE-serve-amx.yaml", threads=1)
    assert model.report is not None
    assert not model.report.floats_kept
    assert set(_backends(model).values()) == {"AMXINT8"}
    assert "1 thread" in repr(model)
    with pytest.raises(UndoError):
        model.report.undo()


def test_one_layer_on_int8_and_one_on_bf16_by_two_calls(checkpoint: Path) -> None:
    model = KTransformer.from_pretrained(checkpoint)
    model.inject_expert_backend(r"layers\.1\.mlp\.experts$", backend="INT8")
    model.inject_expert_backend(r"layers\.2\.mlp\.experts$", backend="BF16")
    assert _backends(model) == {"model.layers.1.mlp.experts": "INT8", "model.layers.2.mlp.experts": "BF16"}


@pytest.mark.parametrize("keep_float", [True, False])
def test_another_backend_for_layers_that_run_on_one_already(checkpoint: Path, keep_float: bool) -> None:
    direct = KTransformer.from_pretrained(checkpoint, keep_float=keep_float)
    direct.inject_expert_backend(EXPERTS, backend="INT8")
    model = KTransformer.from_pretrained(checkpoint, keep_float=keep_float)
    model.inject_expert_backend(EXPERTS, backend="BF16", rotate=False)
    untouched = model.model.get_submodule("model.layers.2.mlp.experts")
    model.inject_expert_backend(r"layers\.1\.mlp\.experts$", backend="INT8")
    assert _backends(model) == {"model.layers.1.mlp.experts": "INT8", "model.layers.2.mlp.experts": "BF16"}
    assert model.model.get_submodule("model.layers.2.mlp.experts") is untouched
    report = model.inject_expert_backend(EXPERTS, backend="INT8")
    assert [r.name for r in report.replacements] == ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts"]
    assert report.counts() == {1: 2}
    assert torch.equal(_logits(model), _logits(direct))
    experts = model.model.get_submodule("model.layers.1.mlp.experts")
    assert experts.has_float_weights == keep_float


def test_a_relative_name_means_the_folder_of_the_time_it_was_given(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    model = KTransformer.from_pretrained(checkpoint.name, rules=INT8_RULES)
    wanted = _logits(model)
    models.save_with_tokenizer(models.make_qwen3_moe(seed=1), tmp_path / checkpoint.name)  # another model of that name
    monkeypatch.chdir(tmp_path)
    model.inject_expert_backend(EXPERTS, backend="BF16")
    model.inject_expert_backend(EXPERTS, backend="INT8")
    assert torch.equal(_logits(model), wanted)


def test_each_undo_of_two_injections_restores_what_its_own_replaced(checkpoint: Path) -> None:
    model = KTransformer.from_pretrained(checkpoint, keep_float=True)
    plain = _logits(model)
    first = model.inject_expert_backend(EXPERTS, backend="INT8")
    on_int8 = _logits(model)
    operator = model.model.get_submodule("model.layers.1.mlp.experts")
    second = model.inject_expert_backend(r"layers\.1\..*experts$", backend="BF16")
    with pytest.raises(UndoError, match="nothing was undone"):
        first.undo()
    second.undo()
    assert model.model.get_submodule("model.layers.1.mlp.experts") is operator
    assert torch.equal(_logits(model), on_int8)
    first.undo()
    assert _backends(model) == {}
    assert torch.equal(_logits(model), plain)


@pytest.mark.parametrize("keep_float", [True, False])
def test_a_failure_at_the_second_layer_leaves_every_layer_as_it_was(
    checkpoint: Path, keep_float: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = KTransformer.from_pretrained(checkpoint, keep_float=keep_float)
    model.inject_expert_backend(r"layers\.2\.mlp\.experts$", backend="INT8")
    before = _logits(model)
    load = KTransformersExperts.load

    def fail_at_two(self: KTransformersExperts) -> None:
        if "layers.2" in self.key:
            raise MemoryError("no room")
        load(self)

    monkeypatch.setattr(KTransformersExperts, "load", fail_at_two)
    with pytest.raises(InjectionError, match="no room"):
        model.inject_expert_backend(EXPERTS, backend="BF16")
    assert _backends(model) == {"model.layers.2.mlp.experts": "INT8"}
    assert torch.equal(_logits(model), before)
    monkeypatch.undo()
    model.inject_expert_backend(EXPERTS, backend="BF16")
    assert set(_backends(model).values()) == {"BF16"}


def test_a_wrong_backend_is_refused_before_anything_moves(checkpoint: Path) -> None:
    model = KTransformer.from_pretrained(checkpoint)
    model.inject_expert_backend(EXPERTS, backend="INT8")
    before = _logits(model)
    with pytest.raises(RuleMatchError, match="AMXINT8"):
        model.inject_expert_backend(EXPERTS, backend="AMXINT9")
    with pytest.raises(RuleMatchError, match="did you mean 'rotate'"):
        model.inject_expert_backend(EXPERTS, backend="INT8", rotated=True)
    assert torch.equal(_logits(model), before)


def test_a_pattern_that_finds_nothing_lists_the_experts_there_are(checkpoint: Path) -> None:
    model = KTransformer.from_pretrained(checkpoint)
    with pytest.raises(RuleMatchError, match=r"model\.layers\.N\.mlp\.experts"):
        model.inject_expert_backend(r"mlp\.expert$", backend="INT8")


def test_rules_are_refused_before_weights_are_read(checkpoint: Path, tmp_path: Path) -> None:
    # The weights are not even there: whoever reads them first would say so instead.
    shutil.copy(checkpoint / "config.json", tmp_path)
    with pytest.raises(RuleMatchError, match="matches no module"):
        KTransformer.from_pretrained(tmp_path, rules=[{"match": {"name": "nothing"}, "replace": {"class": "default"}}])


def test_a_dense_model_has_nothing_to_gain(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, models.make_llama_dense)
    with pytest.raises(RuleMatchError, match="dense model"):
        KTransformer.from_pretrained(tmp_path, rules="auto")


def test_missing_tensors_are_an_error_not_a_warning(tmp_path: Path) -> None:
    rewrite(make_checkpoint(tmp_path), lambda name: None if ".experts." in name else name)
    with pytest.raises(CheckpointError, match="experts' tensors expected 4, found 0"):
        KTransformer.from_pretrained(tmp_path)


def test_a_truncated_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is cut short"):
        KTransformer.from_pretrained(tmp_path)


def test_a_model_without_a_tokenizer_still_computes(tmp_path: Path) -> None:
    models.make_qwen3_moe().save_pretrained(tmp_path)
    model = KTransformer.from_pretrained(tmp_path, rules="auto")
    assert model.tokenizer is None
    assert _logits(model).isfinite().all()
    with pytest.raises(CheckpointError, match="no tokenizer"):
        model.generate(PROMPT)


def test_a_damaged_tokenizer_is_told(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "FromTheFuture"}}')
    with pytest.raises(CheckpointError, match="tokenizer of"):
        KTransformer.from_pretrained(tmp_path)


def test_freed_floats_without_a_folder_say_so(checkpoint: Path) -> None:
    loaded = KTransformer.from_pretrained(checkpoint)
    wrapped = KTransformer(loaded.model, loaded.tokenizer)
    wrapped.inject_expert_backend(EXPERTS, backend="INT8")
    before = _logits(wrapped)
    with pytest.raises(UndoError, match="not known where the model came from"):
        wrapped.inject_expert_backend(EXPERTS, backend="BF16")
    assert torch.equal(_logits(wrapped), before)


def test_weights_are_kept_in_the_dtype_that_was_asked_for(checkpoint: Path) -> None:
    model = KTransformer.from_pretrained(checkpoint, dtype=torch.bfloat16)
    assert model.model.dtype == torch.bfloat16
    model.inject_expert_backend(EXPERTS, backend="INT8")
    model.inject_expert_backend(EXPERTS, backend="BF16")  # floats come back in bf16 too
    assert _logits(model).dtype == torch.bfloat16


def test_a_healthy_start_warns_of_nothing_and_prints_nothing(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    model = KTransformer.from_pretrained(checkpoint, rules="moe")
    model.generate(PROMPT, **GREEDY)
    assert not [record.message for record in caplog.records if record.levelname != "INFO"]
    assert capfd.readouterr() == ("", "")


def test_importing_the_package_imports_nothing_heavy_or_of_a_gpu() -> None:
    heavy = {"torch", "transformers", "triton"}
    program = f"import sys, ktransformers; assert ktransformers.__version__; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_names_of_the_package_are_told_what_there_is() -> None:
    with pytest.raises(AttributeError, match="KTransformer, KTransformersConfig"):
        _ = ktransformers.KTransfomer


def test_a_kernel_of_another_installation_is_refused_with_both_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kt_kernel.__version__", "0.0.1")
    monkeypatch.setattr("ktransformers.version", lambda _: "0.1.0")
    with pytest.raises(ImportError, match=r"ktransformers 0\.1\.0 \(.*\) and kt_kernel 0\.0\.1 \(.*kt_kernel"):
        ktransformers._common_version()
