"""Whether a checkpoint has a tensor for everything the model needs, told from headers before a weight is read.

transformers renames, stacks and concatenates what is on disk, and only warns about what it does not find: a model with
random experts then talks nonsense. Its own conversion is run here on tensors without memory, so both sides speak alike.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection

import torch
from transformers import PreTrainedModel

from ktransformers.checkpoints.conversion import convert_into, names_for
from ktransformers.checkpoints.headers import CheckpointFiles
from ktransformers.errors import CheckpointError

__all__ = ["raise_if_missing", "verify_complete"]

_LISTED = 5
_EXPERT_NUMBER = re.compile(r"(\.experts\.)\d+(\.)")

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def verify_complete(files: CheckpointFiles, meta_model: PreTrainedModel) -> None:
    """Raises `CheckpointError` when loading `files` would leave parameters of the model without weights.

    `meta_model`: the model on the meta device. It is as good as before afterwards.
    """
    unknown = sorted({header.dtype for header in files.tensors.values()} - _DTYPES.keys())
    if unknown:
        raise CheckpointError(f"{files.folder} holds tensors of types this version does not read: {', '.join(unknown)}")
    tensors = {n: torch.empty(h.shape, dtype=_DTYPES[h.dtype], device="meta") for n, h in files.tensors.items()}
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


def _parts(model: PreTrainedModel, files: CheckpointFiles, name: str) -> str:
    """What on disk goes into a parameter, experts counted: `…experts.*.up_proj.weight (7)`."""
    parts = Counter(_EXPERT_NUMBER.sub(r"\1*\2", source) for source in names_for(model, files.tensors, name))
    return ", ".join(f"{part} ({count})" for part, count in sorted(parts.items()))


def _kind(name: str) -> str:
    return "experts' tensors" if ".experts." in name else "other tensors"


def _first(texts: list[str], separator: str) -> str:
    more = f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return separator.join(texts[:_LISTED]) + more
