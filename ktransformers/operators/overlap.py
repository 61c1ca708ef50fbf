"""A result that is awaited at its first use, so that a GPU's shared expert is launched while the CPU computes.

A block calls its experts, gives the result another shape, calls the shared expert, and adds the two. Waiting inside the
experts' forward would keep the GPU idle. So, off the CPU, forward returns a `DeferredTensor`: it has shape, dtype and
device but no memory at all, and the first operation that needs numbers awaits them. There is nothing that could be read
too early: the tensor with the numbers comes into being when they are there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["Completion", "DeferredTensor"]

_aten = torch.ops.aten

# Operations that only look at memory in another way. Everything else awaits the numbers.
_VIEWS = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.unsqueeze.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.alias.default,
        _aten.detach.default,
    }
)


class Completion:
    """Runs `finish` once, at the first `result()`; what it returned or raised is the answer ever after.

    `abandon` runs instead when nobody asked until the completion was collected: it has to wait for work in flight,
    whose memory must outlive it. It must not refer to this object.
    """

    def __init__(self, finish: Callable[[], torch.Tensor], abandon: Callable[[], None]) -> None:
        self._finish: Callable[[], torch.Tensor] | None = finish
        self._tensor: torch.Tensor | None = None
        self._error: BaseException | None = None
        self._unasked = weakref.finalize(self, abandon)

    def result(self) -> torch.Tensor:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._unasked.detach()
            try:
                self._tensor = finish()
            except BaseException as error:
                self._error = error
        if self._error is not None:
            raise self._error
        assert self._tensor is not None
        return self._tensor


class DeferredTensor(torch.Tensor):
    """Stands for the tensor a `Completion` gives, seen through some views."""

    _completion: Completion
    _views: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    _like: torch.Tensor

    @staticmethod
    def __new__(
        cls: type[DeferredTensor],
        like: torch.Tensor,
        device: torch.device,
        completion: Completion,
        views: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (),
    ) -> DeferredTensor:
        """`like`: a meta tensor with the shape and dtype."""
        self: DeferredTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        self._like, self._completion, self._views = like, completion, views
        return self

    def complete(self) -> torch.Tensor:
        """The ordinary tensor, awaited when it is not there yet. Raises what the computation raised."""
        tensor = self._completion.result()
        for view in self._views:
            tensor = view(tensor)
        return tensor

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return repr(self.complete())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _VIEWS:
            source, *rest = args
            assert isinstance(source, DeferredTensor)

            def view(tensor: torch.Tensor) -> torch.Tensor:
                return func(tensor, *rest, **kwargs)  # type: ignore[no-any-return]

            return DeferredTensor(view(source._like), source.device, source._completion, (*source._views, view))
        ready_args, ready_kwargs = tree_map(_ready, (tuple(args), dict(kwargs)))
        return func(*ready_args, **ready_kwargs)


def _ready(value: Any) -> Any:
    return value.complete() if isinstance(value, DeferredTensor) else value
