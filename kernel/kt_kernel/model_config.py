"""What a checkpoint's config.json says that its experts' tensors alone do not show."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_kernel.errors import WeightsError

__all__ = ["ModelConfig"]

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelConfig:
    """`dtype`: that of floats made of quantised weights, as transformers makes them: the configuration's, else bf16."""

    model_type: str = ""
    hidden_size: int | None = None
    dtype: str = "bfloat16"
    quantization: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, source: Path) -> ModelConfig:
        """Of the config.json in a checkpoint's folder, or beside its file; where there is none, nothing is known.

        Raises `WeightsError` for one that cannot be read.
        """
        path = (source if source.is_dir() else source.parent) / "config.json"
        if not path.exists():
            return cls()
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise WeightsError(f"{path} cannot be read: {error}") from error
        if not isinstance(whole, dict):
            raise WeightsError(f"{path} holds a {type(whole).__name__}, not a model's configuration")
        text = whole.get("text_config")
        text = text if isinstance(text, dict) else whole
        hidden = text.get("hidden_size")
        quantization = whole.get("quantization_config") or text.get("quantization_config")
        return cls(
            str(text.get("model_type") or whole.get("model_type") or ""),
            hidden if isinstance(hidden, int) else None,
            _dtype(whole, text),
            quantization if isinstance(quantization, dict) else None,
        )


def _dtype(*configs: Mapping[str, Any]) -> str:
    for config in configs:
        said = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
        if said in _DTYPES:
            return said
    return "bfloat16"
