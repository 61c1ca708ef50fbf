"""What every operator of ours is: a module that stands where another stood, and knows how to check, load and describe
itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn, Self, TypeVar, cast

import torch
from torch import nn

from kt_kernel.layer_formats import LayerFormats
from ktransformers.operators.footprint import Footprint

__all__ = ["BaseInjectedModule", "outside_of_graphs"]

_Forward = TypeVar("_Forward", bound=Callable[..., Any])


def outside_of_graphs(forward: _Forward) -> _Forward:
    """For the forward of an operator on the kernel: `torch.compile` breaks its graph there and calls it as it is. With
    fullgraph=True it is an error that says why.
    """
    reason = "runs in the CPU kernel, outside of torch"
    return cast(_Forward, torch.compiler.disable(forward, reason=reason))  # type: ignore[no-untyped-call]


class BaseInjectedModule(nn.Module):
    """Takes the place of `orig_module` in a model's tree.

    An operator that also defines `load_from(weights: ModuleWeights)` is put into a model before its weights are read,
    and packs them as they come: its constructor gets the original on the meta device. All others wait for a model that
    is loaded whole.

    The original is reachable as `orig_module` but is no child: `parameters()` and `.to(device)` pass it by, so that a
    model can move to a GPU while its float experts stay on the host. A change of dtype reaches the original, so that
    undoing an injection after `model.half()` gives a model of one dtype. `state_dict()` writes the original's tensors
    under their own names for as long as they are there.
    """

    orig_module: nn.Module

    def __init__(self, key: str, gguf_loader: object, config: Any, orig_module: nn.Module) -> None:
        super().__init__()
        self.key = key
        self.gguf_loader = gguf_loader
        self.config = config
        object.__setattr__(self, "orig_module", orig_module)  # around nn.Module: not registered as a child
        self.train(orig_module.training)

    @classmethod
    def check(cls, *, key: str, orig_module: nn.Module, config: Any, kwargs: Mapping[str, Any]) -> list[str]:
        """Problems as sentences, empty when all is well. Runs on meta modules, before anything moves."""
        raise NotImplementedError(f"{cls.__name__} does not say what it accepts: it has to define `check`")

    def load(self) -> None:
        """The heavy work: packs weights from `orig_module`. Progress and freeing the original are the caller's."""

    def describe(self) -> dict[str, str]:
        """For the report: some of op, backend, format, tier, device, bytes."""
        return {"op": type(self).__name__}

    def footprint(self, stored: LayerFormats | None = None) -> Footprint:  # noqa: ARG002
        """What it will hold and read, known before `load()` and on the meta device. By default as the float original:
        an operator that packs or copies weights says better. `stored`: what packs the module's weights exactly where
        they are stored quantised.
        """
        parameters = list(self.orig_module.parameters())
        size = sum(parameter.nbytes for parameter in parameters)
        dtype = str(parameters[0].dtype).removeprefix("torch.") if parameters else "none"
        told = {key: value for key, value in self.describe().items() if key != "bytes"}
        kept = self.needs_original
        return Footprint(told.get("device", "cpu"), dtype, 0 if kept else size, size, kept, details=told)

    @property
    def needs_original(self) -> bool:
        """Whether the operator computes with the original's float weights after `load()`. They are not freed then."""
        return False

    @property
    def has_float_weights(self) -> bool:
        """False once the original's parameters were freed (they are on the meta device, or empty, then)."""
        parameters = list(self.orig_module.parameters())
        return bool(parameters) and not any(p.is_meta or p.numel() == 0 for p in parameters)

    def refuse_tracing_and_gradients(self, *inputs: torch.Tensor) -> None:
        """Raises RuntimeError, with the way out, where an operator that runs outside of torch would be left out."""
        name = type(self).__name__
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise RuntimeError(
                f"{self.key} runs as {name}, whose kernel leaves nothing in a trace but the results of this one call: "
                "undo the injection to use torch.jit.trace"
            )
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            raise RuntimeError(
                f"{self.key} runs as {name}, which computes no gradients: call the model under torch.inference_mode() "
                "or torch.no_grad(), or undo the injection to train"
            )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for parameter in self.orig_module.parameters():
            if parameter.is_floating_point() and not parameter.is_meta:
                # An empty tensor shows what the conversion does without moving gigabytes.
                wanted = fn(torch.empty(0, dtype=parameter.dtype)).dtype
                if wanted != parameter.dtype:
                    parameter.data = parameter.data.to(wanted)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.has_float_weights:
            destination.update(self.orig_module.state_dict(prefix=prefix, keep_vars=keep_vars))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        error_msgs: list[str] = args[-1]
        if any(name.startswith(prefix) for name in state_dict):
            error_msgs.append(
                f"{self.key} runs as {type(self).__name__} on weights packed at injection, so new ones cannot be "
                "loaded into it: undo the injection, load, and inject again."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copies everything but what `_shared_attributes` names: packed weights are read-only and may have two
        owners.
        """
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            twin.__dict__[name] = value if name in self._shared_attributes else copy.deepcopy(value, memo)
        return twin

    _shared_attributes: ClassVar[frozenset[str]] = frozenset({"gguf_loader", "config"})

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{self.key} runs as {type(self).__name__}, whose packed weights belong to this process and cannot be "
            "pickled: keep the checkpoint and the rules, and inject again where the model is needed."
        )
