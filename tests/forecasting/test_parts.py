"""The parts of a forecast: the order of loading, the cache of odd families, how often numbers are rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from ktransformers.checkpoints.parts import PART_BYTES
from ktransformers.forecasting.dry_run import CacheLayer, dry_run
from ktransformers.forecasting.loading import Step, peak_of_loading
from ktransformers.forecasting.quantisation import quantisation_notes, source_quantisation
from tools.families.scan import experts_classes
from tools.families.tiny import paths_of, tiny_model

_MIB = 1 << 20


def test_a_model_loaded_whole_peaks_when_its_first_layer_is_packed() -> None:
    steps = [Step(floats=100, held=60, kept=False, streamed=False)] * 3
    assert peak_of_loading(10, steps) == 10 + 300 + 60


def test_floats_that_are_kept_pile_up() -> None:
    assert peak_of_loading(10, [Step(100, 60, kept=True, streamed=False)] * 3) == 10 + 300 + 180


def test_streamed_layers_are_never_there_as_floats_together() -> None:
    steps = [Step(floats=2 * _MIB, held=_MIB, kept=False, streamed=True)] * 10
    assert peak_of_loading(0, steps) == 10 * _MIB + 3 * 2 * _MIB


def test_of_a_large_layer_only_parts_are_there_as_floats() -> None:
    steps = [Step(floats=4096 * _MIB, held=2048 * _MIB, kept=False, streamed=True)] * 2
    assert peak_of_loading(0, steps) == 4096 * _MIB + 3 * PART_BYTES


def test_a_window_bounds_the_cache() -> None:
    layer = CacheLayer(fixed=8, per_token=10, window=100)
    assert (layer.nbytes(50), layer.nbytes(100), layer.nbytes(1000)) == (508, 1008, 1008)
    assert CacheLayer(8, 10, None).nbytes(1000) == 10_008


# Latent attention, an indexer, sliding windows, convolutions, state spaces, several caches a layer, sorted rows.
@pytest.mark.parametrize(
    "name",
    [
        "DeepseekV3Experts",
        "DeepseekV32Experts",
        "GptOssExperts",
        "Lfm2MoeExperts",
        "NemotronHExperts",
        "LongcatFlashExperts",
        "Llama4TextExperts",
    ],
)
def test_the_cache_of_a_family_is_the_one_that_it_really_fills(name: str) -> None:
    experts = next(found for found in experts_classes() if found.name == name)
    with torch.device("meta"):
        meta = tiny_model(experts)
    run = dry_run(meta, [meta.get_submodule(path) for path in paths_of(meta, experts)])
    assert run is not None
    model: Any = tiny_model(experts)
    tokens = 14  # below the tiny models' windows
    with torch.no_grad():
        cache = model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=True).past_key_values
    real = sum(_tensors(vars(layer)) for layer in cache.layers)
    assert run.cache_bytes(tokens) == real
    assert real > 0


def _tensors(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(_tensors(entry) for entry in entries)


def test_a_model_that_wants_to_see_numbers_has_no_dry_run() -> None:
    class Peeking(nn.Module):
        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            return input_ids.sum().item()

    model: Any = Peeking()
    assert dry_run(model, []) is None


@pytest.mark.parametrize(
    ("source", "dtype", "packed", "said"),
    [
        (None, "bfloat16", "INT8", "quantised once, from the checkpoint's bfloat16"),
        (None, "bfloat16", "BF16", "nothing is lost"),
        (None, "float32", "BF16", "rounded from the checkpoint's float32"),
        ("fp8", "bfloat16", "INT8", "then quantised a second time"),
        ("fp8", "bfloat16", "BF16", "no second quantisation"),
        ("awq", "float16", "FP8", "then quantised a second time"),
    ],
)
def test_how_often_numbers_are_rounded(source: str | None, dtype: str, packed: str, said: str) -> None:
    (note,) = quantisation_notes(source, dtype, [packed, packed])
    assert note.startswith(f"{packed}: ")
    assert said in note


def test_numbers_that_are_kept_are_rounded_no_more() -> None:
    notes = quantisation_notes("gptq", "float16", ["INT4", "INT8"], kept={"INT4"})
    assert notes[0] == "INT4: the numbers that are stored (gptq), nothing is lost"
    assert "then quantised a second time" in notes[1]


def test_the_quantisation_of_a_checkpoint_is_that_of_its_configuration() -> None:
    assert source_quantisation(PreTrainedConfig()) is None
    config = PreTrainedConfig()
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert source_quantisation(config) == "fp8"
