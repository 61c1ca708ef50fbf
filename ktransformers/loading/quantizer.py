"""What transformers calls while `from_pretrained` loads a model for us: before its weights are read, and after."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from ktransformers.checkpoints import CheckpointSource, open_source, read_files
from ktransformers.errors import CheckpointError, UndoError
from ktransformers.experts import WeightsSource
from ktransformers.injection import Plan, Report, Slot, apply_plan, load_placed, make_plan, place_operators
from ktransformers.loading.cache import open_cache
from ktransformers.loading.config import METHOD, KTransformersConfig
from ktransformers.loading.converted import ConvertedFolder
from ktransformers.loading.rules import rules_for
from ktransformers.log import get_logger
from ktransformers.saving import guard_saving

__all__ = ["KTransformersQuantizer"]

log = get_logger("loading")

_NO_SAFETENSORS = (
    "weights_path={}: packed experts stand for those of a checkpoint of safetensors files, and this model is none; "
    "leave weights_path out"
)


@register_quantizer(METHOD)
class KTransformersQuantizer(HfQuantizer):
    """Puts the operators in before weights are read, and loads them when everything else is there.

    To the rest of transformers the model is no quantised one afterwards: it may be cast, evaluated by a `Trainer`, and
    with its floats kept saved. `model.hf_quantizer.report` says what was replaced.
    """

    report: Report
    cache_note: str = ""
    """What came from the cache of packed experts, in a line; empty without one."""
    quantization_config: KTransformersConfig

    def __init__(self, quantization_config: KTransformersConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._plan: Plan | None = None
        self._placed: list[Slot] = []
        self._source: WeightsSource | None = None
        self._ignored: Any = None

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        """Raises rule errors, and `CheckpointError` for a checkpoint that is not whole."""
        with _ordinary_torch():
            options = self.quantization_config
            rules = rules_for(model, options.rules, options.threads)
            self._plan = make_plan(rules, model, allow_dead=options.legacy)
            names = [planned.name for planned in self._plan.replacements]
            source: WeightsSource
            if options.open_source is not None:
                source = options.open_source(model, names)
            else:
                paths = [Path(file) for file in checkpoint_files or ()]
                if not paths or any(path.suffix != ".safetensors" for path in paths):
                    if options.weights_path is not None:
                        raise CheckpointError(_NO_SAFETENSORS.format(options.weights_path))
                    if options.cache:
                        log.info("cache: not used, transformers reads this checkpoint as a whole")
                    return  # everything is injected afterwards
                source = open_source(read_files(paths), model, names)
            tied = getattr(model, "all_tied_weights_keys", None) or {}
            shared = {*tied.keys(), *tied.values()}
            self._placed = place_operators(self._plan, model, holds=source.holds, tied=shared)
            self._source = source
            self._ignored = model._keys_to_ignore_on_load_unexpected
            model._keys_to_ignore_on_load_unexpected = {*(self._ignored or ()), *_left_over(model, self._placed)}

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        assert self._plan is not None
        keep_float = self.quantization_config.keep_float
        if self._source is not None:
            self._load_placed(self._source, model)
        self.report = apply_plan(self._plan, model, keep_float=keep_float, placed=self._placed)
        model._keys_to_ignore_on_load_unexpected = self._ignored
        self._plan, self._placed, self._source = None, [], None
        _forget_quantization(model)
        guard_saving()

    def _load_placed(self, source: WeightsSource, model: PreTrainedModel) -> None:
        options = self.quantization_config
        if options.weights_path is not None:
            self._load_converted(Path(options.weights_path), source)
            return
        cache = None if options.keep_float else open_cache(options.cache, source, model.name_or_path)
        if cache is None:
            with source.modules([slot.name for slot in self._placed]) as weights:
                load_placed(self._placed, weights, keep_float=options.keep_float)
            return
        missing = [slot for slot in self._placed if not cache.load(slot)]
        kept, absent = (sum(map(cache.takes, slots)) for slots in (self._placed, missing))
        self.cache_note = f"cache: {kept - absent} of {kept} layers came packed from {cache.folder}"
        log.info("%s", self.cache_note)
        with source.modules([slot.name for slot in missing]) as weights, cache.writing():
            load_placed(missing, weights, keep_float=False, loaded=cache.keep)

    def _load_converted(self, folder: Path, source: WeightsSource) -> None:
        if not isinstance(source, CheckpointSource):
            raise CheckpointError(_NO_SAFETENSORS.format(folder))
        converted = ConvertedFolder(folder, source.identity()[0])
        missing = [slot for slot in self._placed if not converted.load(slot, source.prefix(slot.name))]
        with source.modules([slot.name for slot in missing]) as weights:
            load_placed(missing, weights, keep_float=False)

    def is_serializable(self) -> bool:
        """With the floats kept `save_pretrained` writes the float checkpoint that was loaded."""
        return self.report.floats_kept

    @property
    def is_trainable(self) -> bool:
        return False

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """The float originals back in their places. Raises `UndoError` when they were freed."""
        try:
            self.report.undo()
        except UndoError as error:
            raise UndoError(f"{error} (KTransformersConfig(keep_float=True))") from error
        return model if dtype is None else model.to(dtype)  # type: ignore[arg-type]


@contextlib.contextmanager
def _ordinary_torch() -> Iterator[None]:
    """Out of transformers' construction of models, where new tensors are on the meta device and of the model's dtype:
    operators look at numbers when they are built.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def _left_over(model: PreTrainedModel, placed: Sequence[Slot]) -> list[str]:
    """Patterns of what transformers finds on disk and leaves to the operators, which it would list as unexpected."""
    base = f"{model.base_model_prefix}."
    # A checkpoint of the bare model has no prefix, and one of a larger model another: the end of the name is enough.
    return [rf"(^|\.){re.escape(slot.name.removeprefix(base))}\." for slot in placed]


def _forget_quantization(model: PreTrainedModel) -> None:
    model.is_quantized = False  # type: ignore[assignment]
    del model.config.quantization_config
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config.__dict__.pop("_is_quantized", None)
