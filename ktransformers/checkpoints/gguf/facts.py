"""What a GGUF file says about its model: metadata under the architecture's prefix, shapes of tensors, token ids.

A key that is needed and absent is noted, and 1 stands for it, so that all that is missing can be said at once. So is a
number that cannot be.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ktransformers.checkpoints.gguf.checkpoint import GgufCheckpoint

__all__ = ["Facts"]


class Facts:
    def __init__(self, checkpoint: GgufCheckpoint) -> None:
        self._checkpoint = checkpoint
        self.problems: list[str] = []

    def get(self, key: str, default: Any = None, *, least: int = 0) -> Any:
        """The value of `<architecture>.<key>`. A list that says the same for every layer counts as that value.
        A whole number below `least` is noted as a problem, and so is one that is not finite.
        """
        value = self._checkpoint.metadata.get(f"{self._checkpoint.architecture}.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                self._complain(f"{self._checkpoint.architecture}.{key} differs from layer to layer: {value[:8]}")
                return 1
            value = value[0]
        if isinstance(value, int) and value < least:
            self._complain(f"{self._checkpoint.architecture}.{key} is {value}, which has to be {least} or more")
            return least
        if isinstance(value, float) and not math.isfinite(value):
            self._complain(f"{self._checkpoint.architecture}.{key} is {value}, which is no number")
            return 1.0
        # Numbers are stored in fp32; their shortest decimal spelling there is what the model's authors wrote.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, key: str, *, least: int = 0) -> Any:
        """As `get`; an absent key is noted as a problem."""
        value = self.get(key, least=least)
        if value is None:
            self._complain(f"the metadata lack {self._checkpoint.architecture}.{key}")
            return 1
        return value

    def only(self, key: str, value: Any) -> None:
        """A key that need not be there, and a problem where it says something else than what the model computes."""
        said = self.get(key, value)
        if said != value:
            self._complain(f"{self._checkpoint.architecture}.{key} {said} is not read; the model computes with {value}")

    def token(self, which: str) -> int | None:
        """The id of the "bos", "eos", "padding", "eot", … token."""
        value = self._checkpoint.metadata.get(f"tokenizer.ggml.{which}_token_id")
        return value if isinstance(value, int) else None

    def has(self, name: str) -> bool:
        return name in self._checkpoint.tensors

    def layers_with(self, name: str) -> list[int]:
        """The blocks that have the tensor `blk.<n>.<name>`, in order."""
        ending = f".{name}"
        found = [n for n in self._checkpoint.tensors if n.startswith("blk.") and n.endswith(ending)]
        return sorted(
            int(n.split(".")[1]) for n in found if n.split(".")[1].isdigit() and n.count(".") == 2 + name.count(".")
        )

    def size(self, name: str, dimension: int) -> int | None:
        """One size of `blk.<n>.<name>` in the first block that has it, in torch's order."""
        layers = self.layers_with(name)
        shape = self._checkpoint.tensors[f"blk.{layers[0]}.{name}"].shape if layers else ()
        return shape[dimension] if -len(shape) <= dimension < len(shape) else None

    def vocabulary(self) -> int:
        embedding = self._checkpoint.tensors.get("token_embd.weight")
        return embedding.shape[0] if embedding else len(self._checkpoint.metadata.get("tokenizer.ggml.tokens", [])) or 1

    def floats(self, name: str) -> list[float] | None:
        """The numbers of a small tensor that belongs to the configuration rather than to the weights."""
        tensor = self._checkpoint.tensors.get(name)
        if tensor is None or self._checkpoint.problems:  # a file that is cut short has none to read
            return None
        numbers: list[float] = self._checkpoint.read(tensor, dtype=torch.float32).flatten().tolist()
        return numbers

    def _complain(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)
