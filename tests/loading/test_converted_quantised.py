"""Quantised checkpoints and gpt-oss, converted ahead of time: the files are what loading packs, to the bit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kt_kernel import WeightsError
from kt_kernel.converter import METHODS, Report, convert
from kt_kernel.packed_file import open_packed
from ktransformers import KTransformer
from tests import models
from tests.checkpoints.folders import make_checkpoint
from tests.checkpoints.quantised import CONFIGS, make_mxfp4, make_pair

OWN = {
    "fp8": "FP8",
    "gptq": "AMXINT4",
    "gptq-8": "auto",  # groups of 8-bit numbers, which no backend makes of floats
    "awq": "AMXINT4",
    "compressed-tensors": "AMXINT4",
    "mxfp4": "AMXINT4",
}


def _configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(scope="module", params=sorted(OWN))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantised")
    return make_mxfp4(folder / "mxfp4") if request.param == "mxfp4" else make_pair(folder, request.param)[0]


def _rules(backend: str) -> list[dict[str, Any]]:
    kwargs = {"backend": backend, "threads": 1}
    return [{"match": {"name": r"\.experts$"}, "replace": {"class": "KTransformersExperts", "kwargs": kwargs}}]


def _packed(model: KTransformer) -> dict[str, bytes]:
    assert model.report is not None
    names = [entry.name for entry in model.report.replacements]
    return {name: bytes(model.model.get_submodule(name).packed_in._packed.bytes()) for name in names}


def _converted(report: Report) -> dict[str, bytes]:
    found = {}
    for name in report.written:
        layer = open_packed(report.output / name)
        found[layer.prefix] = (report.output / name).read_bytes()[len(layer.header) :]
    return found


def test_the_files_are_what_loading_packs(checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for method in METHODS:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "kt_kernel"):
            report = convert(checkpoint, tmp_path / method, method, threads=1)
        exact = method in ("auto", OWN[checkpoint.name])
        assert [line for line in caplog.messages if "second time" in line or "decoded to" in line] == (
            [] if exact else [line for line in caplog.messages if line.startswith(f"{method}: ")]
        )
        assert exact or caplog.messages
        wanted = _packed(KTransformer.from_pretrained(checkpoint, _rules(method)))
        assert _converted(report) == wanted
        if exact:
            assert _packed(KTransformer.from_pretrained(checkpoint, _rules("auto"))) == wanted
        assert convert(checkpoint, tmp_path / method, method, threads=1).written == ()


@pytest.mark.parametrize("backend", ["auto", "own"])
def test_the_checkpoint_loads_with_what_was_converted(checkpoint: Path, tmp_path: Path, backend: str) -> None:
    method = OWN[checkpoint.name]
    convert(checkpoint, tmp_path / "packed", method, threads=1)
    rules = _rules(method if backend == "own" else backend)
    model = KTransformer.from_pretrained(checkpoint, rules, weights_path=tmp_path / "packed")
    assert _packed(model) == _packed(KTransformer.from_pretrained(checkpoint, rules))


@pytest.mark.parametrize("method", METHODS)
def test_gpt_oss_in_floats_is_turned_and_parted(tmp_path: Path, method: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", models.make_gpt_oss)
    stored = load_file(checkpoint / "model.safetensors")["model.layers.0.mlp.experts.gate_up_proj"]
    assert stored.shape == (4, 64, 192)
    report = convert(checkpoint, tmp_path / "packed", method, threads=1)
    assert _converted(report) == _packed(KTransformer.from_pretrained(checkpoint, _rules(method)))


def test_transposed_experts_of_an_unknown_model_are_not_guessed_at(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", models.make_gpt_oss)
    _configure(checkpoint, model_type="gpt_oss_2")
    with pytest.raises(WeightsError, match=r"saved transposed, which is read of gpt_oss, .*'gpt_oss_2'"):
        convert(checkpoint, tmp_path / "packed", "AMXINT8")


def test_layers_that_were_left_out_of_the_quantisation_are_converted_as_floats(tmp_path: Path) -> None:
    quantised, plain = make_pair(tmp_path, "fp8")
    first = "model.layers.1.mlp.experts."
    floats = {name: tensor for name, tensor in load_file(plain / "model.safetensors").items() if name.startswith(first)}
    _change(quantised, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(first)])
    _change(quantised, lambda tensors: tensors.update(floats))
    given, wanted = (_converted(convert(path, tmp_path / f"packed-{path.name}", "FP8")) for path in (quantised, plain))
    name = first.removesuffix(".")
    assert given[name] == wanted[name]
    assert set(given) == set(wanted)
    assert given != wanted  # the other layers have blocks of 128 × 128 of their own


def _change(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


UP = "model.layers.1.mlp.experts.3.up_proj."


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("fp8", lambda t: t.pop(UP + "weight_scale_inv"), r"experts\.up, expert 3 has no weight_scale_inv"),
        ("gptq", lambda t: t.update({UP + "scales": t[UP + "scales"][:, :-1].contiguous()}), r"3\.up_proj\.scales in "),
        ("awq", lambda t: [t.pop(name) for name in list(t) if name.startswith(UP)], "expert 3 has no up"),
        ("gptq", lambda t: t.update({UP + "perm": torch.zeros(4)}), r"would be dropped: .*3\.up_proj\.perm"),
    ],
)
def test_a_quantised_checkpoint_that_is_not_whole_is_refused_before_anything_is_written(
    tmp_path: Path, method: str, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    checkpoint, _ = make_pair(tmp_path, method)
    _change(checkpoint, change)
    with pytest.raises(WeightsError, match=message):
        convert(checkpoint, tmp_path / "packed", "AMXINT8")
    assert not (tmp_path / "packed").exists()


def test_a_quantisation_that_is_not_read_is_named_with_those_that_are(tmp_path: Path) -> None:
    checkpoint, _ = make_pair(tmp_path, "fp8")
    _configure(checkpoint, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(WeightsError, match=rf"quantised by 'bitsandbytes'.*read are {sorted(CONFIGS)[0]}"):
        convert(checkpoint, tmp_path / "packed", "AMXINT8")


def test_a_nan_scale_names_layer_expert_and_projection(tmp_path: Path) -> None:
    checkpoint, _ = make_pair(tmp_path, "gptq")
    _change(checkpoint, lambda tensors: tensors[UP + "scales"][0, 3].fill_(float("nan")))
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.experts.*expert 3.*up"):
        convert(checkpoint, tmp_path / "packed", "AMXINT4")
    assert not list((tmp_path / "packed").glob("*1.mlp*"))


def test_a_later_expert_that_needs_wider_scales_is_known_again(tmp_path: Path) -> None:
    checkpoint = make_mxfp4(tmp_path / "mxfp4")
    name = "model.layers.0.mlp.experts.gate_up_proj_scales"
    _change(checkpoint, lambda tensors: tensors[name][3].fill_(90))  # 2^-37 is none of fp16
    report = convert(checkpoint, tmp_path / "packed", "AMXINT4", threads=1)
    formats = [open_packed(report.output / file).formats for file in report.written]
    assert [each.gate_up.scales for each in formats][:2] == ["float32", "float16"]
    assert _converted(report) == _packed(KTransformer.from_pretrained(checkpoint, _rules("INT4")))
    assert report.nbytes == sum((report.output / file).stat().st_size for file in report.written)
    assert convert(checkpoint, report.output, "AMXINT4", threads=1).written == ()
