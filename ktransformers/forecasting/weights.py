"""The weights that no rule touches: how much they are, and how much of them a decoded token reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ktransformers.errors import UnsupportedModuleError
from ktransformers.experts import ExpertsSpec
from ktransformers.forecasting.dry_run import DryRun

__all__ = ["OtherWeights", "other_weights"]


@dataclass(frozen=True)
class OtherWeights:
    """Bytes by format, such as bfloat16, and bytes that one decoded token reads."""

    by_format: Mapping[str, int]
    read_per_token: int

    @property
    def nbytes(self) -> int:
        return sum(self.by_format.values())


def other_weights(model: PreTrainedModel, replaced: Iterable[nn.Module], run: DryRun | None) -> OtherWeights:
    """Of everything in `model` (on the meta device) but the modules in `replaced`; tied weights count once.

    Read are the modules that the dry run entered, of embeddings one row, of experts a token's share. Without a dry run
    every module counts as entered.
    """
    # By module: a head that is packed leaves the embedding that it is tied to in memory.
    apart = {id(inner) for module in replaced for inner in module.modules()}
    tied = _tied(model)
    by_format: dict[str, int] = {}
    counted: set[int] = set()
    reads: dict[int, int] = {}
    for module in model.modules():
        if id(module) in apart:
            continue
        entered = run is None or id(module) in run.entered
        for parameter, share in _shares(module):
            key = tied.get(id(parameter), id(parameter))
            if key not in counted:
                counted.add(key)
                name = str(parameter.dtype).removeprefix("torch.")
                by_format[name] = by_format.get(name, 0) + parameter.nbytes
            if entered:
                # One tensor at two places, such as an embedding that is the head too, is read as much as one asks for.
                reads[key] = max(reads.get(key, 0), share)
    return OtherWeights(by_format, sum(reads.values()))


def _shares(module: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """A module's own parameters, each with the bytes of it that a token reads."""
    own = [parameter for parameter in module.parameters(recurse=False) if parameter is not None]
    if isinstance(module, nn.Embedding):
        yield from ((parameter, parameter.nbytes // max(1, parameter.shape[0])) for parameter in own)
        return
    numerator, denominator = _chosen_of(module)
    yield from ((parameter, parameter.nbytes * numerator // denominator) for parameter in own)


def _chosen_of(module: nn.Module) -> tuple[int, int]:
    """k of E for experts that stay with transformers; 1 of 1 for every other module."""
    if not any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)):
        return 1, 1
    try:
        spec = ExpertsSpec.from_module(module)
    except UnsupportedModuleError:
        return 1, 1
    return min(spec.top_k or spec.num_experts, spec.num_experts), spec.num_experts


def _tied(model: PreTrainedModel) -> dict[int, int]:
    """From the id of a parameter that is tied to the one it is tied to, where they are not one object yet."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    pairs = getattr(model, "all_tied_weights_keys", None) or {}
    return {
        id(parameters[one]): id(parameters[other])
        for one, other in pairs.items()
        if one in parameters and other in parameters
    }
