"""A path or a cached model id becomes a folder; nothing asks the network."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NoReturn

import pytest

from ktransformers.checkpoints import locate
from ktransformers.errors import CheckpointError


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> NoReturn:
        raise AssertionError(f"the network was asked: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def make_cached(cache: Path, name: str) -> Path:
    """An entry of the hub's cache, as a download leaves it."""
    entry = cache / f"models--{name.replace('/', '--')}"
    snapshot = entry / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(snapshot.name)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_a_folder_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert locate(tmp_path) == tmp_path
    assert locate(str(tmp_path)) == tmp_path


def test_a_relative_name_and_a_home_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Qwen3-Moe").mkdir()
    (tmp_path / "Qwen3-Moe" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("Qwen3-Moe") == tmp_path / "Qwen3-Moe"
    assert locate("~/Qwen3-Moe") == tmp_path / "Qwen3-Moe"


@pytest.mark.parametrize("name", ["Qwen3-Moe", "someone/Qwen3-Moe"])
def test_an_id_is_found_in_the_cache(tmp_path: Path, name: str) -> None:
    snapshot = make_cached(tmp_path, name)
    assert locate(name, cache_dir=tmp_path) == snapshot


def test_a_folder_wins_over_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cached(tmp_path / "cache", "Qwen3-Moe")
    (tmp_path / "Qwen3-Moe").mkdir()
    (tmp_path / "Qwen3-Moe" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert locate("Qwen3-Moe", cache_dir=tmp_path / "cache") == tmp_path / "Qwen3-Moe"


def test_an_unknown_name_says_where_it_was_looked_for_and_what_is_near(tmp_path: Path) -> None:
    make_cached(tmp_path, "someone/Qwen3-Moe")
    with pytest.raises(CheckpointError) as caught:
        locate("someone/Qwen3-Mo", cache_dir=tmp_path)
    for part in ("no folder", str(tmp_path), "near: someone/Qwen3-Moe", "Nothing is downloaded"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["../nowhere", "a/b/c", "white space", "", "~/nowhere-at-all", "/nowhere"])
def test_names_that_can_be_no_id_are_the_same_error(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        locate(name, cache_dir=tmp_path)


def test_folders_and_files_that_are_no_checkpoint_are_explained(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"without a config\.json"):
        locate(tmp_path)
    with pytest.raises(CheckpointError, match="is a file, and no GGUF file"):
        locate(tmp_path / "model.bin")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="its folder inner has one"):
        locate(tmp_path)


def test_an_empty_name_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="name of the model is empty"):
        locate("")
