"""What users name: a file, any part of a split set, a folder, a pattern; and sets that are not whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ktransformers import KTransformer
from ktransformers.checkpoints.gguf import find_gguf, open_gguf
from ktransformers.errors import CheckpointError
from tests.checkpoints.gguf.loading import load, logits
from tests.checkpoints.gguf.writer import Wish, write_gguf
from tests.models import make_mixtral


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model in three parts or more."""
    written = write_gguf(make_mixtral(), tmp_path_factory.mktemp("split") / "model.gguf", Wish(split=14))
    assert len(written) >= 3
    return written


@pytest.fixture
def copies(parts: list[Path], tmp_path: Path) -> list[Path]:
    """The parts, to be spoilt."""
    return [Path(shutil.copy(part, tmp_path)) for part in parts]


def test_any_part_the_folder_and_a_pattern_are_the_whole_model(parts: list[Path]) -> None:
    names = [*parts, parts[0].parent, parts[0].parent / "model-*.gguf"]
    assert all(find_gguf(name) == parts for name in names)
    assert torch.equal(logits(load(parts[1])), logits(make_mixtral()))


def test_a_missing_part_is_named(copies: list[Path]) -> None:
    copies[1].unlink()
    for name in (copies[0], copies[1], copies[0].parent):
        with pytest.raises(CheckpointError, match=rf"lacks 1 of the {len(copies)} parts of model: {copies[1].name}"):
            find_gguf(name)


def test_parts_of_another_set_are_noticed(copies: list[Path]) -> None:
    shutil.copy(copies[2], copies[1])
    with pytest.raises(CheckpointError) as raised:
        KTransformer.from_pretrained(copies[0])
    text = str(raised.value)
    assert f"{copies[1].name} says it is part 3 of {len(copies)}, not 2 of {len(copies)}" in text
    assert "is in" in text  # tensors that two parts hold
    assert "tensors missing" in text or "not" in text


def test_a_part_without_its_name_cannot_find_the_others(copies: list[Path], tmp_path: Path) -> None:
    alone = copies[0].rename(tmp_path / "renamed.gguf")
    problems = open_gguf([alone]).problems
    assert any(f"says it is one of {len(copies)} parts" in problem for problem in problems)


def test_a_folder_of_several_models_lists_them(tmp_path: Path) -> None:
    for name in ("big-Q4_K_M.gguf", "big-Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models: big-Q4_K_M\.gguf, big-Q8_0\.gguf"):
        find_gguf(tmp_path)
    assert find_gguf(tmp_path / "big-Q8_0.gguf") == [tmp_path / "big-Q8_0.gguf"]


def test_projectors_beside_a_model_are_no_second_model(tmp_path: Path) -> None:
    for name in ("mmproj-model-f16.gguf", "model.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert find_gguf(tmp_path) == [tmp_path / "model.gguf"]


def test_a_config_beside_gguf_files_makes_the_folder_an_ordinary_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(tmp_path) is None


def test_a_file_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"there is no file .*modl\.gguf; .* holds model\.gguf"):
        find_gguf(tmp_path / "modl.gguf")


def test_a_link_whose_target_was_not_fetched_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to("../blobs/4d7a")
    with pytest.raises(CheckpointError, match=r"model\.gguf is a link to \.\./blobs/4d7a, which is not there"):
        find_gguf(tmp_path / "model.gguf")


def test_files_without_an_ending_are_known_by_their_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "sha256-0123").write_bytes(b"GGUF")
    assert find_gguf(tmp_path / "sha256-0123") == [tmp_path / "sha256-0123"]
