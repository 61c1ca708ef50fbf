"""Headers of safetensors files tell of missing shards and short copies before a weight is read."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ktransformers.checkpoints import read_headers
from ktransformers.errors import CheckpointError


def _make_single(folder: Path) -> Path:
    save_file({"a": torch.zeros(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}, folder / "model.safetensors")
    return folder / "model.safetensors"


def _make_sharded(folder: Path) -> Path:
    save_file({"a": torch.zeros(2)}, folder / "model-1.safetensors")
    save_file({"b": torch.zeros(2)}, folder / "model-2.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    return index


def test_names_types_and_shapes_are_read(tmp_path: Path) -> None:
    path = _make_single(tmp_path)
    files = read_headers(tmp_path)
    assert files is not None
    assert {n: (h.file, h.dtype, h.shape) for n, h in files.tensors.items()} == {
        "a": (path, "F32", (3, 4)),
        "b": (path, "BF16", (5,)),
    }


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    _make_sharded(tmp_path)
    files = read_headers(tmp_path)
    assert files is not None
    assert {h.file.name for h in files.tensors.values()} == {"model-1.safetensors", "model-2.safetensors"}


@pytest.mark.parametrize("kept", [0, 4, 8, 20, -1])
def test_a_file_cut_short_is_named_with_both_sizes(tmp_path: Path, kept: int) -> None:
    path = _make_single(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is (damaged or )?cut short.*bytes"):
        read_headers(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", r"damaged.*git lfs pull"),
        (b"\n<!DOCTYPE html><html><title>Sign in</title></html>", r"damaged.*web page.*fetch it again"),
        (b"", r"cut short: it has 0 bytes"),
        (b"not weights at all", r"damaged.*18 bytes"),
    ],
)
def test_a_file_that_is_something_else_is_told_by_its_first_bytes(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors is {words}"):
        read_headers(tmp_path)


def test_a_link_whose_target_was_not_fetched_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../../blobs/4d7a")
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is a link to \.\./\.\./blobs/4d7a, which is not there"
    ):
        read_headers(tmp_path)


@pytest.mark.parametrize("place", ["", ".cache/huggingface/download"])
def test_unfinished_downloads_are_mentioned_where_weights_are_missing(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    (tmp_path / place / "model.safetensors.4d7a.incomplete").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds no weights.*\(1 unfinished downloads? lie"):
        read_headers(tmp_path)
    _make_sharded(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of its 2 weight files: model-2\.safetensors \(1 unfinished"):
        read_headers(tmp_path)


@pytest.mark.parametrize("header", [b"[1, 2]  ", b'{"a": 1}', b'{"a": {}}', b"{'a'}   ", b"\xff\xfe\x00\x01    "])
def test_a_header_that_is_no_header_is_damaged(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(CheckpointError, match="damaged"):
        read_headers(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    _make_sharded(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of its 2 weight files: model-2\.safetensors"):
        read_headers(tmp_path)


def test_a_tensor_of_the_index_that_no_shard_holds_is_named(tmp_path: Path) -> None:
    _make_sharded(tmp_path)
    shutil.copy(tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors")
    with pytest.raises(CheckpointError, match=r"1 of the 2 tensors .* are in no file: b"):
        read_headers(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": []}', "not json"])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    _make_sharded(tmp_path).write_text(text)
    with pytest.raises(CheckpointError, match="is no index of weights"):
        read_headers(tmp_path)


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        read_headers(tmp_path)


def test_older_formats_are_left_to_transformers(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert read_headers(tmp_path) is None


def test_without_an_index_a_tensor_in_two_files_is_an_error(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"one\.safetensors and .*two\.safetensors both hold a, and no index"):
        read_headers(tmp_path)


def test_files_stay_open_for_what_was_entered_after_them(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.zeros(2)}, tmp_path / "model.safetensors")
    files = read_headers(tmp_path)
    assert files is not None
    late: list[torch.Tensor] = []
    with ExitStack() as stack:
        read = files.opened(stack)
        stack.callback(lambda: late.append(read("a", slice(None))))  # a thread that reads ahead ends like this
        read("b", slice(None))
    assert torch.equal(late[0], torch.ones(2))
