"""How often the numbers of a checkpoint are rounded on their way into the kernel."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from transformers import PreTrainedConfig

__all__ = ["quantisation_notes", "source_quantisation"]

_FLOATS = {"float32": 24, "float16": 11, "bfloat16": 8, "BF16": 8}  # bits of precision


def source_quantisation(config: PreTrainedConfig) -> str | None:
    """The method by which the checkpoint is quantised already, such as fp8 or gptq; None for a float one."""
    for part in (config, config.get_text_config()):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
            return str(getattr(method, "value", method) or "an unnamed method")
    return None


def quantisation_notes(source: str | None, dtype: str, formats: Iterable[str], kept: Collection[str] = ()) -> list[str]:
    """A sentence for each format that weights are packed in: what becomes of numbers that are `dtype`, or quantised by
    `source`, on disk. `kept`: formats that hold the quantised numbers as they are.
    """
    return [_note(source, dtype, name, kept) for name in dict.fromkeys(formats)]


def _note(source: str | None, dtype: str, packed: str, kept: Collection[str]) -> str:
    if source is not None and packed in kept:
        return f"{packed}: the numbers that are stored ({source}), nothing is lost"
    if source is not None:
        second = "packed as floats, no second quantisation" if packed in _FLOATS else "then quantised a second time"
        return f"{packed}: the checkpoint is quantised ({source}); its weights become {dtype}, {second}"
    if packed not in _FLOATS:
        return f"{packed}: quantised once, from the checkpoint's {dtype}"
    if _FLOATS[packed] < _FLOATS.get(dtype, 0):
        return f"{packed}: rounded from the checkpoint's {dtype}"
    return f"{packed}: as the checkpoint has it, nothing is lost"
