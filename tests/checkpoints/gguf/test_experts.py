"""Experts in every form in which files hold them, read as floats and packed for the kernel while the model loads."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ktransformers import KTransformer
from ktransformers.operators.experts import KTransformersExperts
from tests.checkpoints.gguf.loading import load, logits
from tests.checkpoints.gguf.writer import Wish, quantize, tensors_of, type_of, write_gguf
from tests.models import make_gpt_oss, make_granite_moe, make_mixtral, make_qwen3_moe

# Everything that this version of the gguf package decodes in blocks, BF16 among it; and F16, which it has no class for.
_TYPES = sorted({"F16", *(kind.name for kind in gguf.quants._type_traits)})


def wide_qwen3_moe() -> PreTrainedModel:
    """Of sizes that K blocks of 256 divide."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2, "num_experts": 4}
    return make_qwen3_moe(mlp_only_layers=[], **sizes)


def unpacked(module: KTransformersExperts, expert: int) -> tuple[torch.Tensor, ...]:
    """Gate, up and down as the kernel has them."""
    packed = module.packed_in._packed
    wide = (module.intermediate_dim, module.hidden_dim)
    matrices = torch.empty(wide), torch.empty(wide), torch.empty(wide[::-1])
    packed.unpack_expert(expert, *(matrix.data_ptr() for matrix in matrices))
    return matrices


def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).norm() / right.norm())


@pytest.mark.parametrize("form", ["merged", "single"])
def test_gate_and_up_in_one_tensor_and_a_tensor_an_expert_are_the_same_model(form: str, tmp_path: Path) -> None:
    original = make_mixtral()
    write_gguf(original, tmp_path / "model.gguf", Wish(experts=form))
    loaded = load(tmp_path / "model.gguf")
    assert torch.equal(logits(loaded), logits(original))


@pytest.mark.parametrize("kind", _TYPES)
def test_weights_of_every_type_are_those_of_the_gguf_package(kind: str, tmp_path: Path) -> None:
    types = {"": kind, "token_embd": "F32"}
    original = make_qwen3_moe(
        mlp_only_layers=[], hidden_size=256, moe_intermediate_size=256, num_hidden_layers=1, num_experts=2
    )
    write_gguf(original, tmp_path / "model.gguf", Wish(types=types))
    theirs = tensors_of(load(tmp_path / "model.gguf"), "qwen3moe")
    with np.errstate(all="ignore"):
        for name, numbers in tensors_of(original, "qwen3moe").items():
            written = type_of(name, numbers, types)
            reference = gguf.quants.dequantize(quantize(numbers, written), gguf.GGMLQuantizationType[written])
            assert np.array_equal(theirs[name], reference), name


@pytest.mark.parametrize("make", [make_gpt_oss, make_granite_moe, make_mixtral])
def test_experts_are_packed_as_they_would_be_from_the_model_in_memory(make: object, tmp_path: Path) -> None:
    original = make()  # type: ignore[operator]
    write_gguf(original, tmp_path / "model.gguf")
    streamed = KTransformer.from_pretrained(tmp_path / "model.gguf", rules="auto", dtype=torch.float32)
    whole = KTransformer.from_pretrained(tmp_path / "model.gguf", dtype=torch.float32)
    whole.inject_expert_backend(".*experts$", backend="auto")
    assert streamed.report is not None
    assert len(streamed.report.replacements) == original.config.num_hidden_layers
    assert torch.equal(logits(streamed.model), logits(whole.model))


@pytest.mark.parametrize(
    ("gate", "up", "down", "packed"),
    [
        ("Q4_K", "Q4_K", "Q6_K", "INT4+INT8_GROUPED"),
        ("Q4_K", "Q5_K", "Q4_0", "INT8_GROUPED+INT4"),
        ("Q8_0", "Q8_0", "Q8_0", "INT8_GROUPED"),
        ("Q4_0", "Q4_0", "Q4_1", "INT4"),
        ("MXFP4", "MXFP4", "MXFP4", "INT4"),
        ("Q2_K", "Q2_K", "Q3_K", "INT4"),
    ],
)
def test_backend_auto_packs_the_numbers_of_the_file(gate: str, up: str, down: str, packed: str, tmp_path: Path) -> None:
    original = wide_qwen3_moe()
    types = {"": "F32", "ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    write_gguf(original, tmp_path / "model.gguf", Wish(types=types))
    floats = load(tmp_path / "model.gguf")
    loaded = KTransformer.from_pretrained(tmp_path / "model.gguf", rules="auto", dtype=torch.float32)
    experts = [module for module in loaded.model.modules() if isinstance(module, KTransformersExperts)]
    assert {module.describe()["format"] for module in experts} == {packed}
    stored = floats.model.layers[1].mlp.experts
    for expert in range(4):
        gate, up, down = unpacked(experts[1], expert)
        assert torch.equal(torch.cat([gate, up]), stored.gate_up_proj[expert])
        assert torch.equal(down, stored.down_proj[expert])
    # Activations are rounded to 8 bits, and now and then a token goes to another expert for it.
    assert distance(logits(loaded.model), logits(floats)) < 0.1


def test_another_backend_quantises_a_second_time_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_gguf(wide_qwen3_moe(), tmp_path / "model.gguf", Wish(types={"": "F32", "_exps": "Q4_K"}))
    rules = [
        {"match": {"name": r"\.experts$"}, "replace": {"class": "KTransformersExperts", "kwargs": {"backend": "INT8"}}}
    ]
    KTransformer.from_pretrained(tmp_path / "model.gguf", rules=rules, dtype=torch.float32)
    assert "quantised a second time, to INT8" in caplog.text


def test_the_backend_changes_and_floats_are_read_again_from_the_file(tmp_path: Path) -> None:
    write_gguf(make_mixtral(), tmp_path / "model.gguf", Wish(types={"": "Q8_0"}))
    kt = KTransformer.from_pretrained(tmp_path / "model.gguf", rules="auto", dtype=torch.float32)
    kt.inject_expert_backend(".*experts$", backend="BF16")
    formats = {m.describe()["format"] for m in kt.model.modules() if isinstance(m, KTransformersExperts)}
    assert formats == {"BF16"}
    assert distance(logits(kt.model), logits(load(tmp_path / "model.gguf"))) < 0.02


def test_expert_weights_are_not_read_as_floats_when_they_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktransformers.checkpoints.gguf.module import ExpertsModule

    write_gguf(make_mixtral(), tmp_path / "model.gguf")
    monkeypatch.setattr(ExpertsModule, "fill", lambda *_: pytest.fail("a layer was read as floats"))
    KTransformer.from_pretrained(tmp_path / "model.gguf", rules="auto")


@pytest.mark.parametrize("backend", ["INT8", "auto"])
def test_what_was_made_of_the_file_is_kept_for_the_next_start(backend: str, tmp_path: Path) -> None:
    write_gguf(make_mixtral(), tmp_path / "model.gguf", Wish(types={"": "Q8_0"}))
    rules = [
        {"match": {"name": r"\.experts$"}, "replace": {"class": "KTransformersExperts", "kwargs": {"backend": backend}}}
    ]
    options = {"rules": rules, "dtype": torch.float32, "cache": tmp_path / "cache"}
    first = KTransformer.from_pretrained(tmp_path / "model.gguf", **options)
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 3
    second = KTransformer.from_pretrained(tmp_path / "model.gguf", **options)
    assert torch.equal(logits(second.model), logits(first.model))
