"""Files of packed experts: what is refused, and what it says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kt_kernel import GateFormula, KernelError, MoEWrapper, WeightsError, _ext
from kt_kernel.converter import convert
from kt_kernel.layer_formats import LayerFormats
from kt_kernel.packed_file import find_packed, map_packed, open_packed, read_packed
from tests.kernel.layers import make_layer
from tests.kernel.mixtral import FILES, LAYERS, PREFIXES, make_mixtral, make_wrapper


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_mixtral(tmp_path / "mixtral")


def test_several_packed_layers_need_a_prefix(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "out", "AMXINT8", threads=1)
    wrapper = make_wrapper()
    with pytest.raises(WeightsError, match=r"3 layers; pass prefix= with one of 'model\.layers\.0"):
        wrapper.load_weights(tmp_path / "out")
    with pytest.raises(WeightsError, match="did you mean"):
        wrapper.load_weights(tmp_path / "out", prefix=PREFIXES[0].replace("block_sparse", "block"))
    assert not wrapper.loaded
    wrapper.load_weights(tmp_path / "out", prefix="model.layers.1")
    assert wrapper.loaded


@pytest.mark.parametrize(
    ("backend", "options", "config", "message"),
    [
        ("BF16", {}, {}, r"format INT8 \(wanted: BF16\)"),
        ("INT8", {"rotate": False}, {}, r"rotated True \(wanted: False\)"),
        ("INT8", {"gate": GateFormula(gated=False)}, {}, r"gated True \(wanted: False\)"),
        ("INT8", {}, {"hidden_size": 48, "expert_num": 8}, r"expert_num 4 \(wanted: 8\), hidden_size 40"),
    ],
    ids=["format", "rotation", "gate", "sizes"],
)
def test_a_file_packed_for_another_wrapper_is_refused(
    checkpoint: Path, tmp_path: Path, backend: str, options: dict[str, Any], config: dict[str, int], message: str
) -> None:
    convert(checkpoint, tmp_path / "out", "AMXINT8", threads=1)
    wrapper = MoEWrapper({**LAYERS[0].config(2), **config}, backend=backend, threads=1, **options)
    with pytest.raises(WeightsError, match=message):
        wrapper.load_weights(tmp_path / "out" / FILES[0])
    assert not wrapper.loaded


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="mapped pages are counted from Linux's /proc")
def test_warming_up_brings_every_page_of_a_mapped_file_in(tmp_path: Path) -> None:
    layer = make_layer(8, 256, 256)
    tensors = {f"experts.{name}": torch.from_numpy(value) for name, value in layer.weights().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", tmp_path / "out", "AMXBF16", threads=1)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    wrapper = MoEWrapper(layer.config(2), backend="BF16", threads=1)
    wrapper.load_weights(file, mapped=True)
    assert _mapped(file) < file.stat().st_size / 2
    wrapper.warm_up()
    assert _mapped(file) >= wrapper.nbytes


def _mapped(file: Path) -> int:
    """Bytes of a file that this process has in its page tables."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    found = [next(line for line in lines if line.startswith("Rss:")) for line in lines if line.endswith(str(file))]
    return sum(int(line.split()[1]) * 1024 for line in found)


def _damage(file: Path, old: bytes, new: bytes) -> None:
    data = file.read_bytes()
    assert data.count(old) == 1
    assert len(old) == len(new)
    file.write_bytes(data.replace(old, new))


def test_a_damaged_or_older_file_is_refused_with_what_to_do(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(checkpoint, out, "AMXINT8", threads=1)
    file, layout = out / FILES[0], str(_ext.LAYOUT_VERSION)
    good = file.read_bytes()
    cases: dict[str, Callable[[], object]] = {
        "is truncated": lambda: file.write_bytes(good[:-1]),
        "is too long": lambda: file.write_bytes(good + b"\0"),
        "has layout 0; this version reads": lambda: _damage(
            file, f'"layout": "{layout}"'.encode(), b'"layout": "%b"' % b"0".rjust(len(layout), b"0")
        ),
        "has file format 9": lambda: _damage(file, b'"kt_format": "3"', b'"kt_format": "9"'),
        "contradict": lambda: _damage(file, b'"shape": [4, ', b'"shape": [2, '),
        "metadata are damaged": lambda: _damage(file, b'\\"experts\\": 4', b'\\"experts\\": 0'),
        "damaged, truncated or no safetensors": lambda: file.write_bytes(good[:100]),
    }
    for message, damage in cases.items():
        file.write_bytes(good)
        damage()
        with pytest.raises(WeightsError, match=message):
            make_wrapper().load_weights(file)
    with pytest.raises(WeightsError, match="is not a file of packed experts"):
        open_packed(checkpoint / "model-1.safetensors")


def test_packed_and_float_files_in_one_folder_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "out", "AMXINT8", threads=1)
    assert find_packed(checkpoint) is None
    shutil.copy(checkpoint / "model-1.safetensors", tmp_path / "out")
    with pytest.raises(WeightsError, match=r"also files that are not \(model-1"):
        make_wrapper().load_weights(tmp_path / "out", prefix=PREFIXES[0])


def test_packed_bytes_of_another_length_or_shape_are_refused() -> None:
    packed = LayerFormats.both("INT8").allocate(2, 40, 24, rotate=True)
    size = packed.bytes_per_expert
    for data in (bytes(size - 1), bytes(size + 1), b"", memoryview(bytes(2 * size))[::2]):
        with pytest.raises(KernelError, match="bytes"):
            packed.load_expert(0, data)
    with pytest.raises(KernelError, match="expert 2 of 2"):
        packed.load_expert(2, bytes(size))
    packed.load_expert(0, bytes(size))
    packed.load_expert(1, b"\x07" * size)
    assert bytes(packed.bytes()) == bytes(size) + b"\x07" * size


@pytest.mark.parametrize("mapped", [False, True], ids=["copied", "mapped"])
def test_formats_that_the_kernel_does_not_know_are_an_error_of_the_file(
    checkpoint: Path, tmp_path: Path, mapped: bool
) -> None:
    convert(checkpoint, tmp_path / "out", "AMXINT8", threads=1)
    layer = open_packed(tmp_path / "out" / FILES[0])
    grouped = replace(layer.formats.down, group=100)
    damaged = replace(layer, formats=replace(layer.formats, down=grouped))
    file = tmp_path / "damaged.safetensors"
    file.write_bytes(damaged.header + bytes(damaged.nbytes))
    read = map_packed if mapped else read_packed
    with pytest.raises(WeightsError, match=r"damaged.safetensors.*group"):
        read(file, open_packed(file))
