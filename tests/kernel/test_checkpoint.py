"""Weights given as a path: one file, a folder, an index, every naming found in the wild."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kt_kernel import MoEWrapper, WeightsError
from tests.kernel.layers import make_input, make_layer, same_bits

LAYER = make_layer(4, 24, 16)
X, IDS, WEIGHTS = make_input(LAYER, 5, 2)
STACKED = {name: torch.from_numpy(value) for name, value in LAYER.weights().items()}
PREFIX = "model.layers.0.mlp.experts."
W_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _single(prefix: str, pattern: str = "{expert}.{name}.weight") -> dict[str, torch.Tensor]:
    return {
        prefix + pattern.format(expert=expert, name=name, w=W_NAMES[name]): tensor[expert].clone()
        for name, tensor in STACKED.items()
        for expert in range(LAYER.experts)
    }


def _output(weights: Any, prefix: str | None = None) -> Any:
    wrapper = MoEWrapper(LAYER.config(2), backend="INT8", threads=1)
    wrapper.load_weights(weights, prefix=prefix)
    return wrapper.forward(X, IDS, WEIGHTS)


@pytest.fixture(scope="module")
def expected() -> Any:
    return _output(LAYER.weights())


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    "tensors",
    [
        STACKED,
        {PREFIX + name: tensor for name, tensor in STACKED.items()},
        {
            PREFIX + "gate_up_proj": torch.cat([STACKED["gate_proj"], STACKED["up_proj"]], 1),
            PREFIX + "down_proj": STACKED["down_proj"],
        },
        {
            "mlp.input_linear.weight": torch.cat([STACKED["gate_proj"], STACKED["up_proj"]], 1),
            "mlp.output_linear.weight": STACKED["down_proj"],
        },
        _single(PREFIX),
        _single(""),
        _single("experts.", "{expert}.{w}.weight"),
        _single("model.layers.0.block_sparse_moe.experts.", "{expert}.{w}.weight"),
    ],
    ids=[
        "stacked",
        "stacked with prefix",
        "gate and up fused",
        "granite",
        "single",
        "bare single",
        "w1 w2 w3",
        "old mixtral",
    ],
)
def test_every_naming_and_layout_gives_the_same_weights(
    tmp_path: Path, tensors: dict[str, torch.Tensor], expected: Any
) -> None:
    assert same_bits(_output(_save(tmp_path / "layer.safetensors", tensors)), expected)


def test_bf16_files_are_read_as_bf16(tmp_path: Path) -> None:
    half = {name: tensor.bfloat16() for name, tensor in STACKED.items()}
    assert same_bits(_output(str(_save(tmp_path / "half.safetensors", half))), _output(half))


def test_a_folder_of_several_files_is_one_checkpoint(tmp_path: Path, expected: Any) -> None:
    tensors = _single(PREFIX)
    for part in range(3):
        _save(tmp_path / f"model-{part}.safetensors", dict(list(tensors.items())[part::3]))
    assert same_bits(_output(tmp_path), expected)


def test_a_folder_with_an_index_reads_the_files_it_lists(tmp_path: Path, expected: Any) -> None:
    tensors = _single(PREFIX)
    halves = {"a.safetensors": dict(list(tensors.items())[::2]), "b.safetensors": dict(list(tensors.items())[1::2])}
    for name, part in halves.items():
        _save(tmp_path / name, part)
    _save(tmp_path / "consolidated.safetensors", tensors)  # a second copy that the index does not mention
    weight_map = {tensor: name for name, part in halves.items() for tensor in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert same_bits(_output(tmp_path), expected)
    assert same_bits(_output(index), expected)


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    _save(tmp_path / "weights" / "layer.safetensors", STACKED)
    assert same_bits(_output("~/weights/layer.safetensors"), expected)


def test_the_rest_of_a_checkpoint_is_left_alone(tmp_path: Path, expected: Any) -> None:
    others = {
        "model.embed_tokens.weight": torch.zeros(8, 24),
        "model.layers.0.mlp.gate.weight": torch.zeros(4, 24),
        "model.layers.0.mlp.shared_expert.gate_proj.weight": torch.zeros(16, 24),
        "model.layers.1.mlp.gate_proj.weight": torch.zeros(16, 24),
        "model.layers.1.mlp.up_proj.weight": torch.zeros(16, 24),
        "model.layers.1.mlp.down_proj.weight": torch.zeros(24, 16),
    }
    assert same_bits(_output(_save(tmp_path / "m.safetensors", {**_single(PREFIX), **others})), expected)


def test_several_layers_need_a_prefix(tmp_path: Path, expected: Any) -> None:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in _single("model.layers.10.mlp.experts.").items()}
    path = _save(tmp_path / "m.safetensors", {**_single("model.layers.1.mlp.experts."), **zeros})
    with pytest.raises(WeightsError, match=r"of 2 layers; pass prefix= .*'model.layers.1.mlp.experts'"):
        _output(path)
    for prefix in ("model.layers.1.mlp.experts", "model.layers.1.mlp.experts.", "model.layers.1"):
        assert same_bits(_output(path, prefix), expected)
    assert not _output(path, "model.layers.10").any()
    with pytest.raises(WeightsError, match=r"prefix 'model.layers' fits the experts of 2 layers"):
        _output(path, "model.layers")
    with pytest.raises(
        WeightsError, match=r"no experts under prefix 'model.layer.1.mlp.experts'.*did you mean 'model.layers.1"
    ):
        _output(path, "model.layer.1.mlp.experts")


def test_missing_tensors_are_counted_and_the_first_named(tmp_path: Path) -> None:
    tensors = {
        name: tensor for name, tensor in _single(PREFIX).items() if ".down_proj." not in name and ".1." not in name
    }
    with pytest.raises(WeightsError, match=r"6 of 12 tensors are missing: 0.down_proj, 1.down_proj.* and 1 more"):
        _output(_save(tmp_path / "m.safetensors", tensors))


def test_an_expert_too_many_is_the_configs_mistake(tmp_path: Path) -> None:
    tensors = {**_single(PREFIX), f"{PREFIX}7.gate_proj.weight": torch.zeros(16, 24)}
    with pytest.raises(WeightsError, match="has expert 7; the config's expert_num is 4, so the last is 3"):
        _output(_save(tmp_path / "m.safetensors", tensors))


@pytest.mark.parametrize(
    "extra", ["0.gate_proj.zero_point", "0.gate_proj.weight_scale_inv", "gate_up_proj_scale_inv", "0.extra.weight"]
)
def test_scales_beside_the_experts_are_refused_and_never_dropped(tmp_path: Path, extra: str) -> None:
    tensors = {**_single(PREFIX), PREFIX + extra: torch.zeros(16)}
    with pytest.raises(WeightsError, match=f"the kernel would drop: '{PREFIX}{extra}'"):
        _output(_save(tmp_path / "m.safetensors", tensors))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int32, torch.float64])
def test_quantised_checkpoints_are_refused_by_dtype_and_never_read_as_floats(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in STACKED.items()}
    with pytest.raises(WeightsError, match=r"is (F8_E4M3|I8|I32|F64); the kernel packs float32, bfloat16, float16"):
        _output(_save(tmp_path / "m.safetensors", tensors))


def test_a_checkpoint_whose_names_fit_nothing_shows_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(
        WeightsError, match=r"no experts in .*m.safetensors: looked for gate_proj.*found 'blk.0.ffn_gate_exps'"
    ):
        _output(_save(tmp_path / "m.safetensors", {"blk.0.ffn_gate_exps": torch.zeros(4, 16, 24)}))


@pytest.mark.parametrize("kept", [0, 4, 100, -1, -400])
def test_a_truncated_file_is_named_with_its_size(tmp_path: Path, kept: int) -> None:
    path = _save(tmp_path / "short.safetensors", STACKED)
    content = path.read_bytes()[:kept]
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=rf"short.safetensors \({len(content)} bytes\) is damaged, truncated"):
        _output(path)


def test_a_wrong_shape_in_a_file_is_told_with_the_file(tmp_path: Path) -> None:
    tensors = {**_single(PREFIX), PREFIX + "2.up_proj.weight": torch.zeros(15, 24)}
    with pytest.raises(WeightsError, match=r"2.up_proj.weight in .*m.safetensors has shape \(15, 24\); .* \(16, 24\)"):
        _output(_save(tmp_path / "m.safetensors", tensors))


def test_paths_that_hold_no_safetensors_say_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no weights at .*nowhere: there is no such file or folder"):
        _output(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match=r"holds no .safetensors file \(it holds nothing\)"):
        _output(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"it holds pytorch_model.bin"):
        _output(tmp_path)
    with pytest.raises(WeightsError, match=r"pytorch_model.bin is not a .safetensors file"):
        _output(tmp_path / "pytorch_model.bin")


def test_an_index_that_does_not_fit_its_folder_is_named(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    _save(tmp_path / "a.safetensors", STACKED)
    with pytest.raises(WeightsError, match=r"lists files that are not there: b.safetensors \(1 missing\)"):
        _output(tmp_path)
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    with pytest.raises(WeightsError, match="the index lists tensors that its files do not hold: x"):
        _output(tmp_path)
    index.write_text("{not json")
    with pytest.raises(WeightsError, match="is not a safetensors index"):
        _output(tmp_path)


def test_a_tensor_in_two_files_is_ambiguous(tmp_path: Path) -> None:
    _save(tmp_path / "a.safetensors", STACKED)
    _save(tmp_path / "b.safetensors", STACKED)
    with pytest.raises(WeightsError, match=r"is in two files: .*a.safetensors and .*b.safetensors"):
        _output(tmp_path)
