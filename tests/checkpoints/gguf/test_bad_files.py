"""Files that cannot be loaded: one message before any computing, that lists everything."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktransformers import KTransformer
from ktransformers.checkpoints.gguf import open_gguf
from ktransformers.checkpoints.gguf.header import read_header
from ktransformers.errors import CheckpointError
from tests.checkpoints.gguf.writer import Wish, write_gguf
from tests.models import (
    make_deepseek_v3,
    make_granite_moe,
    make_llama_dense,
    make_mixtral,
    make_olmoe,
    make_qwen3_moe,
)


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        KTransformer.from_pretrained(path)
    return str(raised.value)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(make_mixtral(num_hidden_layers=1), path)
    return path


def test_a_download_cut_short_says_how_much_is_missing(sound: Path, tmp_path: Path) -> None:
    whole = sound.read_bytes()
    (tmp_path / "model.gguf").write_bytes(whole[: len(whole) * 9 // 10])
    text = refusal(tmp_path / "model.gguf")
    assert f"is cut short: it has {len(whole) * 9 // 10} of {len(whole)} bytes" in text
    assert "tensors lie beyond its end" in text


def test_a_header_cut_short_is_no_crash(sound: Path, tmp_path: Path) -> None:
    for length in (0, 3, 7, 20, 100, 1000):
        (tmp_path / "model.gguf").write_bytes(sound.read_bytes()[:length])
        text = refusal(tmp_path / "model.gguf")
        assert "damaged or cut short" in text or "no GGUF file" in text


def test_another_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"<!DOCTYPE html>")
    assert "is no GGUF file: it begins with b'<!DO'" in refusal(tmp_path / "model.gguf")


@pytest.mark.parametrize(("version", "words"), [(1, "GGUF version 1;"), (3 << 24, "big-endian")])
def test_versions_that_are_not_read(version: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    assert words in refusal(tmp_path / "model.gguf")


def test_absurd_counts_are_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1))
    assert "cannot hold 1152921504606846976 tensors" in refusal(tmp_path / "model.gguf")


def test_missing_tensors_are_counted_and_named(tmp_path: Path) -> None:
    drop = ("blk.0.attn_q.weight", "blk.0.ffn_down_exps.weight", "output_norm.weight")
    write_gguf(make_mixtral(num_hidden_layers=1), tmp_path / "model.gguf", Wish(drop=drop))
    text = refusal(tmp_path / "model.gguf")
    assert "2 tensors missing: " in text
    assert all(name in text for name in drop)


def test_tensors_that_nothing_takes_are_not_dropped_silently(tmp_path: Path) -> None:
    bias = {"blk.0.attn_output.bias": np.zeros(64, np.float32)}
    write_gguf(make_mixtral(num_hidden_layers=1), tmp_path / "model.gguf", Wish(add=bias))
    assert "1 tensor that mixtral does not take: blk.0.attn_output.bias" in refusal(tmp_path / "model.gguf")


def test_a_tensor_of_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    add = {
        "blk.0.attn_q.weight": np.zeros((32, 64), np.float32),
        "blk.0.ffn_up_exps.weight": np.zeros((4, 9, 64), "f4"),
    }
    write_gguf(make_mixtral(num_hidden_layers=1), tmp_path / "model.gguf", Wish(add=add))
    text = refusal(tmp_path / "model.gguf")
    assert "blk.0.attn_q.weight (32, 64) cannot be made into shape (64, 64)" in text
    assert "blk.0.ffn_up_exps.weight has experts of shape (9, 64), the model's have (96, 64)" in text


def test_an_unknown_architecture_lists_those_that_are_known(tmp_path: Path) -> None:
    write_gguf(make_llama_dense(), tmp_path / "model.gguf", Wish(metadata={"general.architecture": "foo"}))
    text = refusal(tmp_path / "model.gguf")
    assert "architecture 'foo' is not read" in text
    assert "qwen3moe" in text


def test_everything_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    lacking = {"context_length": None, "expert_used_count": None, "rope.scaling.type": "magic"}
    write_gguf(make_mixtral(num_hidden_layers=1), tmp_path / "model.gguf", Wish(metadata=lacking))
    text = refusal(tmp_path / "model.gguf")
    assert "llama.context_length" in text
    assert "llama.expert_used_count" in text
    assert "'magic'" in text


@pytest.mark.parametrize("key", ["attn_factor", "yarn_ext_factor"])
def test_a_rope_scaling_that_transformers_does_not_have_is_refused(key: str, tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 128, key: 0.5}
    metadata = {f"rope.scaling.{name}": value for name, value in yarn.items()}
    write_gguf(make_mixtral(num_hidden_layers=1), tmp_path / "model.gguf", Wish(metadata=metadata))
    assert f"llama.rope.scaling.{key} 0.5 is not read; the model computes with 1.0" in refusal(tmp_path / "model.gguf")


def test_numbers_that_no_model_has_are_named(tmp_path: Path) -> None:
    wrong = {
        "attention.head_count": 0,
        "block_count": 0,
        "rope.freq_base": float("nan"),
        "attention.layer_norm_rms_epsilon": float("inf"),
    }
    write_gguf(make_mixtral(num_hidden_layers=1), tmp_path / "model.gguf", Wish(metadata=wrong))
    text = refusal(tmp_path / "model.gguf")
    assert "llama.attention.head_count is 0, which has to be 1 or more" in text
    assert "llama.block_count is 0, which has to be 1 or more" in text
    assert "llama.rope.freq_base is nan, which is no number" in text
    assert "llama.attention.layer_norm_rms_epsilon is inf, which is no number" in text


@pytest.mark.parametrize(
    ("step", "words"), [(1, "blk.0.attn_q.weight is not aligned to 32 bytes"), (-32, "and blk.0.attn_q.weight overlap")]
)
def test_tensors_that_lie_in_one_another_are_not_read(sound: Path, tmp_path: Path, step: int, words: str) -> None:
    data = bytearray(sound.read_bytes())
    name = b"blk.0.attn_q.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8 + 4
    (offset,) = struct.unpack_from("<Q", data, place)
    struct.pack_into("<Q", data, place, offset + step)
    (tmp_path / "model.gguf").write_bytes(data)
    assert words in refusal(tmp_path / "model.gguf")


@pytest.mark.parametrize("make", [make_mixtral, make_qwen3_moe, make_olmoe, make_granite_moe])
def test_a_router_that_the_model_does_not_have_is_refused(make: Callable[..., Any], tmp_path: Path) -> None:
    metadata = {"expert_gating_func": 2, "expert_weights_scale": 2.5}
    write_gguf(make(mlp_only_layers=[]), tmp_path / "model.gguf", Wish(metadata=metadata))
    text = refusal(tmp_path / "model.gguf")
    assert "expert_gating_func 2 is not read; the model computes with 1" in text
    assert "expert_weights_scale 2.5 is not read; the model computes with 1.0" in text


def test_types_that_are_not_read_are_counted(sound: Path, tmp_path: Path) -> None:
    data = bytearray(sound.read_bytes())
    name = b"blk.0.ffn_gate_exps.weight"
    kind = data.index(name) + len(name) + 4 + 3 * 8
    data[kind : kind + 4] = struct.pack("<I", 24)  # I8
    (tmp_path / "model.gguf").write_bytes(data)
    assert "type I8 is not read (1 tensor, such as blk.0.ffn_gate_exps.weight)" in refusal(tmp_path / "model.gguf")
    data[kind : kind + 4] = struct.pack("<I", 999)
    (tmp_path / "model.gguf").write_bytes(data)
    assert "ggml type 999, which the gguf package does not know" in refusal(tmp_path / "model.gguf")


def test_how_experts_are_grouped_is_never_guessed(tmp_path: Path) -> None:
    lacking = {"expert_group_count": None, "expert_group_used_count": None}
    write_gguf(make_deepseek_v3(), tmp_path / "model.gguf", Wish(metadata=lacking))
    assert "no model of 8 experts is known" in refusal(tmp_path / "model.gguf")


def test_a_nan_among_the_experts_names_layer_and_expert(tmp_path: Path) -> None:
    model = make_mixtral(num_hidden_layers=2)
    model.model.layers[1].mlp.experts.down_proj.data[3, 5, 7] = float("nan")
    write_gguf(model, tmp_path / "model.gguf")
    with pytest.raises(Exception, match=r"model\.layers\.1\.mlp\.experts.*expert 3.*down"):
        KTransformer.from_pretrained(tmp_path / "model.gguf", rules="auto")


def test_a_file_that_changed_after_its_header_was_read(sound: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(sound.read_bytes())
    opened = open_gguf([tmp_path / "model.gguf"])
    (tmp_path / "model.gguf").write_bytes(sound.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="has become shorter"):
        opened.read(opened.tensors["output.weight"])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=4))
def test_no_damage_to_a_header_is_anything_but_an_error_or_a_file(
    changes: list[tuple[int, int]], sound: Path, tmp_path: Path
) -> None:
    data = bytearray(sound.read_bytes()[:40000])
    for place, value in changes:
        data[place] = value
    (tmp_path / "model.gguf").write_bytes(data)
    try:
        read = read_header(tmp_path / "model.gguf")
    except CheckpointError:
        return
    assert all(tensor.nbytes > 0 for tensor in read.tensors.values())
