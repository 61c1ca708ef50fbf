"""Experts of quantised checkpoints are found by the names they are saved under, and decoded when they are taken."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kt_kernel import WeightsError
from kt_kernel.checkpoint import open_path
from kt_kernel.sources import scheme_for
from kt_kernel.sources.experts import QuantizedLayer, find_quantized
from tests.kernel import quantizers
from tests.kernel.quantizers import Grid, Stored

PREFIX = "model.layers.3.mlp.experts"
SIZES = {"gate_proj": (24, 64), "up_proj": (24, 64), "down_proj": (64, 24)}
GPTQ = {"quant_method": "gptq", "bits": 4}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def _gptq_experts(count: int = 3) -> dict[tuple[int, str], Stored]:
    return {
        (expert, name): quantizers.gptq(Grid.make(*shape, group=32, seed=expert))
        for expert in range(count)
        for name, shape in {**SIZES, "down_proj": (64, 32)}.items()
    }


def _save(tmp_path: Path, experts: dict[tuple[int, str], Stored], names: dict[str, str] | None = None) -> Path:
    tensors = {
        f"{PREFIX}.{expert}.{(names or {}).get(name, name)}.{part}": tensor.contiguous()
        for (expert, name), stored in experts.items()
        for part, tensor in stored.tensors.items()
    }
    tensors["model.layers.3.mlp.gate.weight"] = torch.zeros(3, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def _layer(folder: Path, config: dict[str, Any], stack: ExitStack) -> QuantizedLayer:
    layers = find_quantized(open_path(folder, stack), scheme_for(config))
    assert list(layers) == [PREFIX]
    return layers[PREFIX]


def _values(weight: Any) -> np.ndarray:
    return weight if isinstance(weight, np.ndarray) else weight.dequantize()


@pytest.mark.parametrize("names", [None, {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}])
def test_one_set_of_tensors_for_each_expert(tmp_path: Path, names: dict[str, str] | None) -> None:
    experts = _gptq_experts()
    with ExitStack() as stack:
        matrices = _layer(_save(tmp_path, experts, names), GPTQ, stack).matrices()
        assert set(matrices) == set(SIZES)
        for (expert, name), stored in experts.items():
            np.testing.assert_array_equal(_values(matrices[name][expert]), stored.meaning)


def test_every_expert_is_iterated_over_once(tmp_path: Path) -> None:
    with ExitStack() as stack:
        matrices = _layer(_save(tmp_path, _gptq_experts()), GPTQ, stack).matrices()
        assert len(list(matrices["up_proj"])) == len(matrices["up_proj"]) == 3


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    experts = _gptq_experts()
    del experts[1, "up_proj"]
    with ExitStack() as stack, pytest.raises(WeightsError, match=r"experts: expert 1 has no up"):
        _layer(_save(tmp_path, experts), GPTQ, stack).matrices()


def test_a_missing_projection_is_named(tmp_path: Path) -> None:
    experts = {key: stored for key, stored in _gptq_experts().items() if key[1] != "down_proj"}
    with ExitStack() as stack, pytest.raises(WeightsError, match="3 experts without down_proj"):
        _layer(_save(tmp_path, experts), GPTQ, stack).matrices()


def test_experts_that_were_left_out_of_the_quantisation_come_as_floats(tmp_path: Path) -> None:
    experts = {
        (expert, name): quantizers.fp8(*shape, (128, 128), "weight_scale_inv")
        for expert in range(2)
        for name, shape in SIZES.items()
    }
    plain = torch.randn(24, 64).bfloat16()
    experts[1, "up_proj"] = Stored({"weight": plain}, plain.float().numpy())
    with ExitStack() as stack:
        matrices = _layer(_save(tmp_path, experts), FP8, stack).matrices()
        np.testing.assert_array_equal(_values(matrices["up_proj"][1]), plain.float().numpy())
        np.testing.assert_array_equal(_values(matrices["up_proj"][0]), experts[0, "up_proj"].meaning)


def test_gpt_oss_has_one_tensor_for_all_experts_with_gate_and_up_in_turns(tmp_path: Path) -> None:
    gate_up = [quantizers.mxfp4(48, 64, seed) for seed in range(3)]
    down = [quantizers.mxfp4(64, 32, 10 + seed) for seed in range(3)]
    tensors = {
        f"{PREFIX}.{name}_{part}": torch.stack([stored.tensors[part] for stored in group])
        for name, group in {"gate_up_proj": gate_up, "down_proj": down}.items()
        for part in ("blocks", "scales")
    }
    tensors[f"{PREFIX}.gate_up_proj_bias"] = torch.arange(3 * 48.0).reshape(3, 48).bfloat16()
    tensors[f"{PREFIX}.down_proj_bias"] = torch.ones(3, 64).bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    with ExitStack() as stack:
        layer = _layer(tmp_path, {"quant_method": "mxfp4"}, stack)
        matrices = layer.matrices(interleaved=True)
        for expert in range(3):
            np.testing.assert_array_equal(_values(matrices["gate_proj"][expert]), gate_up[expert].meaning[0::2])
            np.testing.assert_array_equal(_values(matrices["up_proj"][expert]), gate_up[expert].meaning[1::2])
            np.testing.assert_array_equal(_values(matrices["down_proj"][expert]), down[expert].meaning)
        assert np.asarray(matrices["gate_proj_bias"])[0].tolist() == list(range(0, 48, 2))
        assert np.asarray(matrices["up_proj_bias"])[0].tolist() == list(range(1, 48, 2))
        assert np.asarray(matrices["down_proj_bias"]).shape == (3, 64)
        halves = layer.matrices()
        np.testing.assert_array_equal(_values(halves["up_proj"][2]), gate_up[2].meaning[24:])
        assert len(list(layer.entries)) == 6
