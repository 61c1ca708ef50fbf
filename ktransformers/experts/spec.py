"""`ExpertsSpec`: what an experts module of transformers computes, read from its tensors, flags and gate."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ktransformers.errors import UnsupportedModuleError
from ktransformers.experts.gate import GateFormula, recognise_gate
from ktransformers.experts.probe import (
    Layout,
    computes,
    has_foreign_forward,
    is_replaced_on_instance,
    probe,
    with_gate,
)

__all__ = ["ExpertsSpec"]

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# Spellings of the same number across families' configurations.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_INTERMEDIATE_SIZES = ("moe_intermediate_size", "intermediate_size", "expert_ffn_hidden_size")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act")
_TOP_KS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
    "experts_per_token",
    "top_k",
)


@dataclass(frozen=True)
class ExpertsSpec:
    """What one experts module holds and computes.

    Attributes:
        class_name: the module's class.
        num_experts, hidden_dim, intermediate_dim: E, H, I as the tensors have them.
        top_k: experts a token by the configuration; None when it has no such number.
        dtype: of the weights.
        has_gate … has_post_expert_norm: transformers' flags of the class.
        is_presorted: its forward takes the hidden states only, (E·T, H), the rows of expert 0 first.
        gate: what is computed between the projections, gated or not; None when the kernel has nothing that agrees.
        unsupported: sentences, one for everything the kernel does not compute exactly. Empty: the kernel may run it.
        notes: sentences on what the configuration says differently from the tensors (the tensors are right).
    """

    class_name: str
    num_experts: int
    hidden_dim: int
    intermediate_dim: int
    top_k: int | None
    dtype: torch.dtype
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool
    has_post_expert_norm: bool
    is_presorted: bool
    gate: GateFormula | None
    unsupported: tuple[str, ...]
    notes: tuple[str, ...]

    @classmethod
    def from_module(cls, module: nn.Module) -> ExpertsSpec:
        """Reads a live or meta module.

        Raises `UnsupportedModuleError`, saying why, for what is no experts module of transformers 5: another forward,
        no stacked 3-D weights, weights that are not floats, or a class outside transformers' experts interface.
        """
        flags = _flags(module)
        experts, hidden, intermediate, dtype = _shapes(module, flags["has_gate"], flags["is_transposed"])
        gate = recognise_gate(with_gate(module), is_concatenated=flags["is_concatenated"], has_gate=flags["has_gate"])
        config = getattr(module, "config", None)
        return cls(
            class_name=type(module).__name__,
            num_experts=experts,
            hidden_dim=hidden,
            intermediate_dim=intermediate,
            top_k=_number(config, _TOP_KS),
            dtype=dtype,
            **flags,
            gate=gate,
            unsupported=_unsupported(module, flags, gate),
            notes=_disagreements(config, experts, hidden, intermediate),
        )


def _flags(module: nn.Module) -> dict[str, bool]:
    """What transformers' interface says of the class, or what its own forward shows. Refuses other modules."""
    name = type(module).__name__
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise UnsupportedModuleError(
            f"{name} keeps each expert as a module of its own: transformers 5 stacks them in tensors"
        )
    if is_replaced_on_instance(module):
        raise UnsupportedModuleError(
            f"the forward of this {name} was replaced by one of its own, whose arithmetic cannot be told: take that "
            "away, or leave the module to transformers"
        )
    arguments = _forward_arguments(module)
    common = all(hasattr(module, attribute) for attribute in ("_apply_gate", *_FLAGS))
    probed = None if common else probe(module, len(arguments))
    if probed is not None:
        layout = {"is_transposed": probed.is_transposed, "is_concatenated": probed.is_concatenated}
        plain = {"has_gate": True, "has_bias": False, "has_post_expert_norm": False}
        _refuse_what_is_not_read(module, probed, norm=False)
        return {**plain, **layout, "is_presorted": probed.is_presorted}
    if len(arguments) != 3:
        inside = " Its child `experts` may be the one meant." if "experts" in dict(module.named_children()) else ""
        raise UnsupportedModuleError(
            f"{name} is no experts module: its forward takes ({', '.join(arguments)}), where experts take hidden "
            f"states, expert ids and routing weights.{inside}"
        )
    stacked = sorted(n for n, p in module.named_parameters(recurse=False) if p.dim() == 3)
    if "down_proj" not in stacked or not {"gate_up_proj", "up_proj"} & set(stacked):
        raise UnsupportedModuleError(
            f"{name} is no experts module: it lacks the stacked weights gate_up_proj (or up_proj) and down_proj of "
            f"three dimensions; it has {', '.join(stacked) or 'none of three dimensions'}"
        )
    if not common:
        raise UnsupportedModuleError(
            f"{name} is outside transformers' experts interface, and its forward computes something else than the "
            "usual arithmetic: leave it to transformers"
        )
    norm = bool(getattr(module, "has_post_expert_norm", False))  # a later flag: older releases have no such modules
    if norm and not isinstance(getattr(module, "post_expert_norm", None), nn.Module):
        raise UnsupportedModuleError(
            f"{name} normalises each expert's output, and no module `post_expert_norm` says how"
        )
    flags = {flag: bool(getattr(module, flag)) for flag in _FLAGS}
    usual = Layout(**flags)
    _refuse_what_is_not_read(module, usual, norm)
    # With a norm in it, no plain arithmetic stands beside it.
    if has_foreign_forward(module) and (norm or not computes(module, usual)):
        raise UnsupportedModuleError(
            f"the forward of {name} is not transformers' own ({type(module).forward.__module__}), and it was not seen "
            "to compute the usual arithmetic: leave the module to transformers"
        )
    return {**flags, "has_post_expert_norm": norm, "is_presorted": False}


def _refuse_what_is_not_read(module: nn.Module, layout: Layout, norm: bool) -> None:
    """A weight that the usual arithmetic has no place for would be dropped without a word."""
    known = {*layout.parameters, "act_fn", *(["post_expert_norm"] if norm else [])}
    strange = sorted(name for name, _ in module.named_parameters() if name.split(".")[0] not in known)
    if strange:
        raise UnsupportedModuleError(
            f"{type(module).__name__} holds {', '.join(strange)}, for which the usual arithmetic has no place; it "
            f"reads {', '.join(layout.parameters)}: leave the module to transformers"
        )


def _forward_arguments(module: nn.Module) -> list[str]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(type(module).forward).parameters.values()
    return [p.name for p in parameters if p.kind in positional][1:]  # without self, whatever it is called


def _shapes(module: nn.Module, has_gate: bool, is_transposed: bool) -> tuple[int, int, int, torch.dtype]:
    """E, H, I and the dtype by the tensors, which have to agree with each other."""
    first_name = "gate_up_proj" if has_gate else "up_proj"
    first, down = module.get_parameter(first_name), module.get_parameter("down_proj")
    experts, hidden, intermediate = down.shape if not is_transposed else (down.shape[0], down.shape[2], down.shape[1])
    rows = 2 * intermediate if has_gate else intermediate
    wanted = (experts, hidden, rows) if is_transposed else (experts, rows, hidden)
    if tuple(first.shape) != wanted:
        raise UnsupportedModuleError(
            f"the weights of {type(module).__name__} do not fit each other: down_proj {tuple(down.shape)} asks for "
            f"{first_name} {wanted}, it is {tuple(first.shape)}"
        )
    for name, tensor in ((first_name, first), ("down_proj", down)):
        if tensor.dtype not in _FLOATS:
            raise UnsupportedModuleError(
                f"{name} of {type(module).__name__} is {str(tensor.dtype).removeprefix('torch.')}: experts are read "
                "from float32, bfloat16 or float16 weights"
            )
    if first.dtype != down.dtype:
        raise UnsupportedModuleError(
            f"{type(module).__name__} mixes dtypes, {first_name} is {first.dtype} and down_proj {down.dtype}: "
            "convert the model to one, e.g. model.to(torch.bfloat16)"
        )
    return experts, hidden, intermediate, first.dtype


def _unsupported(module: nn.Module, flags: dict[str, bool], gate: GateFormula | None) -> tuple[str, ...]:
    if gate is not None:
        return ()
    what = "gate" if flags["has_gate"] else "activation"
    return (f"its {what} computes none of the kernel's formulas{_activation(module)}",)


def _activation(module: nn.Module) -> str:
    """` (hidden_act is 'mish')`, or the class of an activation that is the family's own."""
    activation = getattr(module, "act_fn", None)
    if isinstance(activation, nn.Module) and ".models." in type(activation).__module__:
        return f" (act_fn is {type(activation).__name__})"
    config = getattr(module, "config", None)
    said = {name: value for name in _ACTIVATIONS if isinstance(value := getattr(config, name, None), str)}
    return next((f" ({name} is {value!r})" for name, value in said.items()), "")


def _disagreements(config: Any, experts: int, hidden: int, intermediate: int) -> tuple[str, ...]:
    notes = []
    for what, names, actual in (
        ("experts", _EXPERT_COUNTS, experts),
        ("hidden size", ("hidden_size",), hidden),
        ("intermediate size", _INTERMEDIATE_SIZES, intermediate),
    ):
        said = {name: value for name in names if isinstance(value := getattr(config, name, None), int)}
        if said and actual not in said.values():
            spelt = ", ".join(f"{name}={value}" for name, value in said.items())
            notes.append(f"the tensors have {what} {actual}, the configuration says {spelt}")
    return tuple(notes)


def _number(config: Any, names: tuple[str, ...]) -> int | None:
    nothing = None
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, list | tuple) and value and all(isinstance(v, int) for v in value):
            return int(max(value))  # one number a layer in some families; scratch wants the largest
        if isinstance(value, int) and value > 0:
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            nothing = int(value)  # counts only where no other name has a number
    return nothing
