"""Experts from a folder that `kt convert` wrote, in place of packing those of the checkpoint it was made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import kt_kernel
from kt_kernel.packed_file import PackedLayer, Source, is_packed, open_packed
from ktransformers.errors import CheckpointError
from ktransformers.injection.placing import hide_tensors
from ktransformers.injection.slot import Slot

__all__ = ["ConvertedFolder"]


class ConvertedFolder:
    """The packed layers of a folder, by their prefixes on disk."""

    def __init__(self, folder: Path, sources: Sequence[Source]) -> None:
        """`sources`: the checkpoint's files. Raises `CheckpointError` for a folder without packed experts."""
        self.folder = folder.expanduser()
        self._copies = {source.name: source.copy for source in sources}
        self._layers: dict[str, tuple[Path, PackedLayer]] = {}
        files = sorted(self.folder.glob("*.safetensors"))
        for file in files:
            if is_packed(file):
                layer = self._open(file)
                self._layers[layer.prefix] = file, layer
        if not self._layers:
            raise CheckpointError(f"{self.folder} holds no packed experts: `kt convert` makes them")

    def load(self, slot: Slot, prefix: str) -> bool:
        """Loads an operator, of whose tensors the names on disk begin with `prefix`; False for one that packs nothing.

        Raises `CheckpointError` when the folder has no such layer, or one of another checkpoint, format or size.
        """
        wrapper = getattr(slot.operator, "packed_in", None)
        if not isinstance(wrapper, kt_kernel.MoEWrapper):
            return False
        if prefix not in self._layers:
            there = ", ".join(list(self._layers)[:3])
            raise CheckpointError(
                f"{self.folder} has no packed experts for {slot.name} ({prefix}.…); it has {there}, …"
            )
        file, layer = self._layers[prefix]
        if any(self._copies.get(source.name) != source.copy for source in layer.sources):
            names = ", ".join(source.name for source in layer.sources)
            raise CheckpointError(
                f"{file} was packed from other files than this checkpoint's ({names}): convert it again"
            )
        try:
            wrapper.load_weights(file, prefix, own_grid=wrapper.backend == "auto")
        except kt_kernel.WeightsError as error:
            raise CheckpointError(f"{slot.name}: {error}") from error
        hide_tensors(slot)
        slot.freed = True  # its floats were never here
        return True

    def _open(self, file: Path) -> PackedLayer:
        try:
            return open_packed(file)
        except kt_kernel.WeightsError as error:
            raise CheckpointError(str(error)) from error
