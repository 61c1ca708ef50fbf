"""Where weights come from: a dictionary of arrays, a safetensors file, or a folder of them; all give named entries."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_kernel.arrays import FLOATS, Array, view
from kt_kernel.errors import InputError, WeightsError

__all__ = ["Entry", "LazyStack", "open_dictionary", "open_path"]

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Entry:
    """One tensor. `fetch(None)` gives all of it, `fetch(e)` its e-th slice, without reading the rest of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    where: str
    fetch: Callable[[int | None], Any]

    def array(self, expert: int | None) -> Array:
        return view(self.fetch(expert), self.name, FLOATS)


@dataclass(frozen=True)
class LazyStack:
    """A value of a weights dictionary that is read while it is packed: one tensor for all experts, (E, …), of which
    `fetch(e)` gives the e-th slice. Experts are asked for in ascending order; `dtype` is float32, bfloat16 or float16.
    """

    shape: tuple[int, ...]
    dtype: str
    fetch: Callable[[int], Any]


def open_dictionary(weights: Mapping[str, Any]) -> list[Entry]:
    """Raises `WeightsError` for values that are no arrays of the host's memory."""
    entries = []
    for name, value in weights.items():
        if not isinstance(name, str):
            raise WeightsError(f"the weights' keys are names such as 'gate_proj', not {name!r}")
        if isinstance(value, LazyStack):
            entries.append(Entry(name, value.shape, value.dtype, "the weights dictionary", _on_demand(value)))
            continue
        try:
            dense = value.detach() if hasattr(value, "detach") else value
            found = view(dense, name, FLOATS)
        except InputError as error:
            raise WeightsError(f"weights: {error}") from error
        entries.append(Entry(name, found.shape, found.dtype, "the weights dictionary", _slicer(dense)))
    return entries


def _slicer(value: Any) -> Callable[[int | None], Any]:
    return lambda expert: value if expert is None else value[expert]


def _on_demand(stack: LazyStack) -> Callable[[int | None], Any]:
    def fetch(expert: int | None) -> Any:
        assert expert is not None, "a stack is read expert by expert"
        return stack.fetch(expert)

    return fetch


def open_path(path: Path, stack: ExitStack) -> list[Entry]:
    """The entries of a `.safetensors` file, an index file or a folder; files stay open until `stack` closes.

    Raises `WeightsError` that names the file: absent, not safetensors, truncated, or only in the index.
    """
    path = path.expanduser()
    if not path.exists():
        raise WeightsError(f"no weights at {path}: there is no such file or folder")
    entries: dict[str, Entry] = {}
    files, listed = _files(path)
    for file in files:
        for entry in _open_file(file, stack):
            if entry.name in entries:
                raise WeightsError(f"tensor {entry.name} is in two files: {entries[entry.name].where} and {file}")
            entries[entry.name] = entry
    if absent := sorted(listed - entries.keys()):
        more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        raise WeightsError(f"{path}: the index lists tensors that its files do not hold: {', '.join(absent[:5])}{more}")
    return list(entries.values())


def _files(path: Path) -> tuple[list[Path], set[str]]:
    """The files to open, and the tensors that an index promises."""
    if path.name.endswith(".index.json"):
        return _read_index(path)
    if path.is_file():
        if path.suffix != ".safetensors":
            raise WeightsError(f"{path} is not a .safetensors file; this version reads safetensors only")
        return [path], set()
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        names = ", ".join(index.name for index in indexes)
        raise WeightsError(f"{path} holds several indexes, pass one of them: {names}")
    if indexes:
        return _read_index(indexes[0])
    files = sorted(path.glob("*.safetensors"))
    if not files:
        there = ", ".join(sorted(child.name for child in path.iterdir())[:5]) or "nothing"
        raise WeightsError(f"{path} holds no .safetensors file (it holds {there})")
    return files, set()


def _read_index(index: Path) -> tuple[list[Path], set[str]]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(file) for file in weight_map.values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is not a safetensors index with a 'weight_map': {error!r}") from error
    files = [index.parent / name for name in sorted(names)]
    if absent := [file.name for file in files if not file.is_file()]:
        raise WeightsError(f"{index} lists files that are not there: {', '.join(absent[:5])} ({len(absent)} missing)")
    return files, set(weight_map)


def _open_file(file: Path, stack: ExitStack) -> list[Entry]:
    from safetensors import SafetensorError, safe_open  # brings torch, which a program that passes arrays may not have

    try:
        handle = stack.enter_context(safe_open(str(file), framework="pt"))
        entries = []
        for name in handle.keys():  # noqa: SIM118 (a file handle, not a dictionary)
            header = handle.get_slice(name)
            dtype = str(header.get_dtype())
            shape = tuple(header.get_shape())
            entries.append(Entry(name, shape, _SAFETENSORS_DTYPES.get(dtype, dtype), str(file), _reader(handle, name)))
    except (SafetensorError, OSError) as error:
        if not file.exists():
            where = f" is a link to {file.readlink()}, which is not there" if file.is_symlink() else " was removed"
            raise WeightsError(f"{file}{where}: fetch it again") from error
        size = file.stat().st_size
        raise WeightsError(f"{file} ({size} bytes) is damaged, truncated or no safetensors file: {error}") from error
    return entries


def _reader(handle: Any, name: str) -> Callable[[int | None], Any]:
    return lambda expert: handle.get_tensor(name) if expert is None else handle.get_slice(name)[expert]
