"""`KTransformersConfig`: what to inject while `from_pretrained` loads, in the form that transformers passes around."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from ktransformers.experts import WeightsSource
from ktransformers.rules import RuleSet, RulesLike

__all__ = ["METHOD", "KTransformersConfig"]

METHOD = "ktransformers"

OpenSource = Callable[[PreTrainedModel, Sequence[str]], WeightsSource]
"""Given the model on the meta device and the names of the modules that may be asked for."""


@register_quantization_config(METHOD)
class KTransformersConfig(QuantizationConfigMixin):
    """For `AutoModelForCausalLM.from_pretrained(path, quantization_config=KTransformersConfig(rules="auto"))`.

    Args:
        rules: a path, the name of a shipped file, a list of rules, or "auto" for the shipped file of the model's type.
        keep_float: keep the float originals beside the operators, for `model.dequantize()` and `save_pretrained`.
            False: they are never in memory as a whole.
        threads: of the kernel, where the rules do not say.
        cache: keep packed experts on disk and map them at the next start: True for the usual place (KT_CACHE_DIR), or a
            folder. Not used together with `keep_float`.
        weights_path: a folder that `kt convert` wrote of this checkpoint, to read experts from. Its method has to be
            the rules' backend.
        legacy: rules that decide nothing are warnings instead of errors, as an older file of upstream's may need.

    Nothing of it is written into a saved `config.json`: the checkpoint stays the float one that it was.
    """

    def __init__(
        self,
        rules: RulesLike = "auto",
        *,
        keep_float: bool = False,
        threads: int | None = None,
        cache: bool | str | os.PathLike[str] = False,
        weights_path: str | os.PathLike[str] | None = None,
        legacy: bool = False,
        **unknown: Any,
    ) -> None:
        unknown.pop("quant_method", None)  # what `from_dict` brings along
        if unknown:
            known = "rules, keep_float, threads, cache, weights_path and legacy"
            raise TypeError(f"KTransformersConfig takes {known}, not {', '.join(unknown)}")
        if weights_path is not None and keep_float:
            raise ValueError("weights_path brings packed experts only: keep_float=True has no floats to keep")
        self.quant_method: Any = METHOD  # transformers' own methods are an enumeration, others are plain names
        self.rules = rules
        self.keep_float = keep_float
        self.threads = threads
        self.cache = cache
        self.weights_path = weights_path
        self.legacy = legacy
        self.open_source: OpenSource | None = None
        """Where operators read their weights, in place of the safetensors files that transformers found."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; rules that were objects as their origin's name."""
        rules = self.rules.origin if isinstance(self.rules, RuleSet) else self.rules
        plain = rules if isinstance(rules, (str, list, type(None))) else str(rules)
        cache = self.cache if isinstance(self.cache, bool) else os.fspath(self.cache)
        return {
            "quant_method": METHOD,
            "rules": plain,
            "keep_float": self.keep_float,
            "threads": self.threads,
            "cache": cache,
            "weights_path": None if self.weights_path is None else os.fspath(self.weights_path),
            "legacy": self.legacy,
        }
