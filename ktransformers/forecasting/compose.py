"""`forecast`: what a model with its rules will take and do here, told before a weight is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kt_kernel.layer_formats import LayerFormats
from kt_kernel.sources import is_read, scheme_for
from ktransformers.checkpoints import locate
from ktransformers.checkpoints.disk_dtype import dtype_on_disk
from ktransformers.checkpoints.gguf import GgufModel, GgufWeights, find_gguf
from ktransformers.forecasting.dry_run import DryRun, dry_run
from ktransformers.forecasting.loading import Step, peak_of_loading
from ktransformers.forecasting.quantisation import quantisation_notes, source_quantisation
from ktransformers.forecasting.result import Forecast, Holding
from ktransformers.forecasting.weights import OtherWeights, other_weights
from ktransformers.injection import Plan, build_meta_model, experts_modules, make_plan, walk
from ktransformers.injection.lines import LayerEntry
from ktransformers.injection.tree import config_of
from ktransformers.loading.rules import rules_for
from ktransformers.memory import memory_limits, resident_bytes
from ktransformers.operators.base import BaseInjectedModule
from ktransformers.operators.experts import KTransformersExperts
from ktransformers.operators.footprint import Footprint
from ktransformers.rules import RulesLike

__all__ = ["forecast"]

# What the first forward adds: the code of torch's matrix products and what they keep. Measured: 54 to 72 MiB.
_FIRST_FORWARD = 60 << 20
# Tokens of a prompt that fill the experts' working memory; fewer take their share.
_LONG_PROMPT = 1024
_USUAL_CONTEXT = 4096
_PACKED = {"KExpertsCPU": "packed experts", "KLinearCPU": "packed linears"}


def forecast(
    model: str | os.PathLike[str] | PreTrainedModel,
    rules: RulesLike | None = None,
    *,
    threads: int | None = None,
    context: int | None = None,
    bandwidth: float | None = None,
    legacy: bool = False,
    trust_remote_code: bool = False,
) -> Forecast:
    """What `model` under `rules` will take here. Reads its configuration, never a weight.

    Args:
        model: a folder, a model id in the local cache, or a model on the meta device.
        rules: anything `load_rules` takes; None or "auto": the shipped file of the model's type.
        threads: of the kernel, where the rules do not say.
        context: tokens that are kept in the cache; None: 4096, or what the model has at most.
        bandwidth: bytes a second, for the ceiling of decoding; `kt_kernel.read_bandwidth()` measures it.
        legacy: rules that decide nothing are no errors.

    Raises `CheckpointError`, `RuleFileError`, `RuleMatchError` as loading would. What does not fit is no error here:
    see `Forecast.raise_unless_fits`.
    """
    meta = model if isinstance(model, PreTrainedModel) else _meta_model(model, trust_remote_code)
    plan = make_plan(rules_for(meta, rules, threads), meta, allow_dead=legacy)
    source = source_quantisation(meta.config)
    operators = _construct(plan, meta)
    gguf = None if isinstance(model, PreTrainedModel) else _gguf(model, meta)
    stored = _stored(meta, operators) if gguf is None else gguf.stored_formats()
    footprints = {
        name: operator.footprint(stored[name]) if name in stored else operator.footprint()
        for name, operator in operators.items()
    }
    modules = list(walk(meta))
    replaced = [meta.get_submodule(name) for name in operators]
    experts = [meta.get_submodule(name) for name in experts_modules(modules)]
    run = dry_run(meta, experts)
    others = other_weights(meta, replaced, run)
    steps = [_step(operator, footprints[name]) for name, operator in operators.items()]
    place = _place_of_others(operators)
    context = min(context or _USUAL_CONTEXT, _longest(meta.config) or context or _USUAL_CONTEXT)
    holdings = [*_of_operators(operators, footprints), *_of_others(others, place)]
    cache = None if run is None else run.cache_bytes(context)
    baseline = resident_bytes()
    resident = sum(h.nbytes for h in holdings if h.device == "cpu")
    scratch = max((footprint.scratch for footprint in footprints.values()), default=0)
    scratch = scratch * min(context, _LONG_PROMPT) // _LONG_PROMPT
    on_host = resident + scratch + _FIRST_FORWARD + (cache or 0 if place == "cpu" else 0)
    return Forecast(
        plan=plan,
        layers=tuple(LayerEntry(p.name, p.rule, _details(footprints, p.name)) for p in plan.replacements),
        holdings=tuple(holdings),
        baseline=baseline,
        loading=baseline + peak_of_loading(others.nbytes, steps),
        running=baseline + on_host,
        context=context,
        cache=cache,
        cache_per_1k=None if run is None else run.cache_bytes(1000),
        limits=tuple(memory_limits()),
        quantisation=tuple(
            quantisation_notes(
                source or _gguf_types(gguf),
                _dtype_of(meta),
                [footprint.format for footprint in footprints.values()],
                kept={stored[name].name for name in operators.keys() & stored}
                & {f.format for f in footprints.values()},
            )
        ),
        approximate=tuple(_approximate(plan, operators, run, source)),
        bandwidth=bandwidth,
    )


def _gguf(model: str | os.PathLike[str], meta: PreTrainedModel) -> GgufWeights | None:
    """What a GGUF file says of the weights; None for other models, and for files that transformers reads whole."""
    files = find_gguf(locate(model))
    opened = None if files is None else GgufModel.open(files)
    return None if opened is None or opened.architecture is None else opened.weights(meta, opened.dtype)


def _stored(meta: PreTrainedModel, operators: Mapping[str, BaseInjectedModule]) -> dict[str, LayerFormats]:
    """By experts module, what packs its numbers as they are stored, where the checkpoint is quantised."""
    config = getattr(meta.config, "quantization_config", None)
    if config is None:
        return {}
    config = config if isinstance(config, Mapping) else config.to_dict()
    packed = scheme_for(config).packed if is_read(config) else None
    experts = (name for name, operator in operators.items() if isinstance(operator, KTransformersExperts))
    return {} if packed is None else {name: LayerFormats(packed, packed) for name in experts}


def _gguf_types(weights: GgufWeights | None) -> str | None:
    """The types of the experts' blocks in a GGUF file; None for a file of floats."""
    types = [] if weights is None else weights.checkpoint.expert_types
    return f"GGUF {', '.join(types)}" if types else None


def _meta_model(source: str | os.PathLike[str], trust_remote_code: bool) -> PreTrainedModel:
    folder = locate(source)
    meta = build_meta_model(folder, trust_remote_code=trust_remote_code)
    # transformers then takes the type of what lies on disk, which only the files' headers tell.
    if getattr(meta.config.get_text_config(), "dtype", None) is None and (dtype := dtype_on_disk(folder)):
        meta.to(dtype)  # type: ignore[arg-type]
    return meta


def _construct(plan: Plan, meta: PreTrainedModel) -> dict[str, BaseInjectedModule]:
    """The plan's operators on the meta device, without weights; one for each place."""
    operators: dict[str, BaseInjectedModule] = {}
    for planned in plan.replacements:
        if planned.operator is None or not issubclass(planned.operator, BaseInjectedModule):
            continue
        operators[planned.name] = planned.operator(
            planned.name, None, config_of(meta, planned.name), meta.get_submodule(planned.name), **planned.kwargs
        )
    return operators


def _step(operator: BaseInjectedModule, footprint: Footprint) -> Step:
    floats = sum(parameter.nbytes for parameter in operator.orig_module.parameters())
    held = footprint.nbytes if footprint.device == "cpu" else 0
    return Step(floats, held, footprint.keeps_original, hasattr(operator, "load_from"))


def _of_operators(operators: dict[str, BaseInjectedModule], footprints: dict[str, Footprint]) -> list[Holding]:
    groups: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    for name, operator in operators.items():
        footprint = footprints[name]
        op = footprint.details.get("op", "")
        kind = _PACKED.get(op, f"{type(operator).__name__} weights")
        key = (kind, footprint.device, footprint.format)
        floats = sum(p.nbytes for p in operator.orig_module.parameters()) if footprint.keeps_original else 0
        groups.setdefault(key, []).append((footprint.nbytes + floats, footprint.read_per_token))
    return [
        Holding(what, device, format, sum(n for n, _ in rows), sum(r for _, r in rows), len(rows))
        for (what, device, format), rows in groups.items()
    ]


def _of_others(others: OtherWeights, device: str) -> list[Holding]:
    shares = sorted(others.by_format.items(), key=lambda entry: -entry[1])
    return [
        Holding("other weights", device, name, size, others.read_per_token if index == 0 else 0)
        for index, (name, size) in enumerate(shares)
    ]


def _place_of_others(operators: dict[str, BaseInjectedModule]) -> str:
    """Where `KTransformer` moves everything but the experts: to their one landing place, where there is one."""
    landings = {str(place) for o in operators.values() if (place := getattr(o, "out_device", None)) is not None}
    return landings.pop() if len(landings) == 1 else "cpu"


def _details(footprints: dict[str, Footprint], name: str) -> dict[str, str]:
    return dict(footprints[name].details) if name in footprints else {}


def _longest(config: Any) -> int | None:
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def _dtype_of(meta: nn.Module) -> str:
    return str(next(meta.parameters()).dtype).removeprefix("torch.")


def _approximate(plan: Plan, told: Mapping[str, object], run: DryRun | None, source: str | None) -> list[str]:
    found = []
    if run is None:
        found.append("this model does not run without numbers: no cache is counted, and all weights count as read")
    if source is not None:
        found.append(f"the checkpoint is quantised ({source}): what is no experts counts as the floats that it becomes")
    if foreign := {planned.rule.replacement for planned in plan.replacements if planned.name not in told}:
        found.append(f"what {', '.join(sorted(foreign))} will hold cannot be told: it counts as the original does")
    return found
