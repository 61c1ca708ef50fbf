"""Whether checkpoint and model hold the same tensors, told from headers before a weight is read.

transformers renames, stacks and concatenates what is on disk, and only warns about what it does not find: a model with
random experts then talks nonsense. So does one whose experts come with tensors that nothing takes, such as the scales
of a quantisation that the configuration does not mention. Its own conversion is run here on tensors without memory, so
both sides speak alike.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection

import torch
from transformers import PreTrainedModel

from ktransformers.checkpoints.conversion import convert_into, names_for
from ktransformers.checkpoints.headers import TORCH_DTYPES, CheckpointFiles
from ktransformers.errors import CheckpointError

__all__ = ["raise_if_missing", "verify_complete"]

_LISTED = 5
_EXPERTS = ".experts."
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERT_NUMBER = re.compile(r"(\.experts\.)\d+(\.)")


def verify_complete(files: CheckpointFiles, meta_model: PreTrainedModel) -> None:
    """Raises `CheckpointError` when loading `files` would leave parameters of the model without weights, leave expert
    tensors of the files out, or take quantised numbers for the weights themselves.

    `meta_model`: the model on the meta device. It is as good as before afterwards.
    """
    unknown = sorted({header.dtype for header in files.tensors.values()} - TORCH_DTYPES.keys())
    if unknown:
        raise CheckpointError(f"{files.folder} holds tensors of types this version does not read: {', '.join(unknown)}")
    _raise_if_quantised(files)
    tensors = {n: torch.empty(h.shape, dtype=TORCH_DTYPES[h.dtype], device="meta") for n, h in files.tensors.items()}
    info = convert_into(meta_model, tensors, "meta")
    problems = [*info.error_msgs]
    # The errors themselves are tracebacks; what lies on disk for the parameter says more.
    problems += [
        f"{name} cannot be made of {_parts(meta_model, files, name)}" for name in sorted(info.conversion_errors)
    ]
    problems += [
        f"{name} has shape {tuple(on_disk)} on disk and {tuple(wanted)} by the configuration, made of "
        + _parts(meta_model, files, name)
        for name, on_disk, wanted in sorted(info.mismatched_keys)
    ]
    if problems:
        raise CheckpointError(f"{files.folder} does not fit the model: {_first(problems, '; ')}")
    raise_if_missing(info.missing_keys, meta_model, str(files.folder))
    _raise_if_left_over(info.unexpected_keys, meta_model, files)


def raise_if_missing(missing: Collection[str], model: PreTrainedModel, source: str) -> None:
    """Raises `CheckpointError` counting what was expected and found, experts apart, and naming the first five."""
    ignored = model._keys_to_ignore_on_load_missing or ()
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    lost = sorted(name for name in missing if name not in tied and not any(re.search(p, name) for p in ignored))
    if not lost:
        return
    expected, absent = Counter(map(_kind, model.state_dict())), Counter(map(_kind, lost))
    counts = ", ".join(
        f"{kind} expected {expected[kind]}, found {expected[kind] - absent[kind]}" for kind in sorted(absent)
    )
    raise CheckpointError(f"{source} is incomplete: {counts}. Missing: {_first(lost, ', ')}.")


def _raise_if_quantised(files: CheckpointFiles) -> None:
    """Called for configurations without a quantisation: transformers would cast such numbers, and drop their scales."""
    packed = {
        name: header.dtype
        for name, header in sorted(files.tensors.items())
        if _EXPERTS in name
        and (TORCH_DTYPES[header.dtype].itemsize == 1 or not TORCH_DTYPES[header.dtype].is_floating_point)
    }
    if packed:
        kinds = ", ".join(sorted(set(packed.values())))
        raise CheckpointError(
            f"{files.folder} holds {len(packed)} experts' tensors as {kinds}, and its config.json "
            "has no quantization_config that says how to read them: restore that entry, or take the "
            f"checkpoint in BF16. They are {_first(list(packed), ', ')}."
        )


def _raise_if_left_over(unexpected: Collection[str], model: PreTrainedModel, files: CheckpointFiles) -> None:
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    left = sorted(
        name
        for name in unexpected
        if _EXPERTS in name and not _predicts_ahead(name, model) and not any(re.search(p, name) for p in ignored)
    )
    if left:
        on_disk = sorted(names_for(model, files.tensors, *left))
        raise CheckpointError(
            f"{files.folder} holds {len(on_disk)} experts' tensors that the model of its config.json does not take: "
            f"{_first(on_disk, ', ')}. Is this the config.json of these weights?"
        )


def _predicts_ahead(name: str, model: PreTrainedModel) -> bool:
    """Whether a tensor is of the layers behind the last one, which only speculative decoding uses."""
    config = model.config.get_text_config()
    ahead = getattr(config, "num_nextn_predict_layers", None) or 0
    layer = _LAYER.search(name)
    return layer is not None and 0 <= int(layer[1]) - config.num_hidden_layers < ahead


def _parts(model: PreTrainedModel, files: CheckpointFiles, name: str) -> str:
    """What on disk goes into a parameter, experts counted: `…experts.*.up_proj.weight (7)`."""
    parts = Counter(_EXPERT_NUMBER.sub(r"\1*\2", source) for source in names_for(model, files.tensors, name))
    return ", ".join(f"{part} ({count})" for part, count in sorted(parts.items()))


def _kind(name: str) -> str:
    return "experts' tensors" if _EXPERTS in name else "other tensors"


def _first(texts: list[str], separator: str) -> str:
    more = f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return separator.join(texts[:_LISTED]) + more
