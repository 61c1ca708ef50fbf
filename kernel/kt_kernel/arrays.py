"""Addresses of tensors and arrays without copying them, and clear words for those that cannot be taken.

Torch tensors are recognised by their attributes; torch itself is never imported here.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from kt_kernel.errors import InputError

__all__ = ["FLOATS", "INTEGERS", "Array", "as_float32", "empty_like", "mention_gradient", "view"]

logger = logging.getLogger("kt_kernel")

FLOATS = ("float32", "bfloat16", "float16")
INTEGERS = ("int64", "int32")

_gradient_said = False


@dataclass(frozen=True, slots=True)
class Array:
    """Where the elements lie. `strides` count elements; `owner` keeps the memory alive."""

    owner: Any
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int

    def rows(self, first: int, last: int) -> Array:
        """Rows `first` to `last` - 1."""
        address = self.address + first * self.strides[0] * self.itemsize
        return Array(self.owner, address, (last - first, *self.shape[1:]), self.strides, self.dtype, self.itemsize)


def view(value: object, name: str, dtypes: tuple[str, ...], *, contiguous: bool = False) -> Array:
    """The memory of a CPU tensor or numpy array; `contiguous` copies when the elements do not lie in order.

    Raises `InputError` that says what `name` is, what was expected and what to do.
    """
    if _is_torch(value):
        return _torch_view(value, name, dtypes, contiguous)
    if isinstance(value, np.ndarray):
        return _numpy_view(value, name, dtypes, contiguous)
    raise InputError(f"{name} has to be a torch tensor or a numpy array, got {type(value).__name__}")


def empty_like(value: Any, shape: tuple[int, ...]) -> Any:
    """Fresh memory of the same library and dtype as `value`, in native byte order."""
    return value.new_empty(shape) if _is_torch(value) else np.empty(shape, dtype=value.dtype.newbyteorder("="))


def as_float32(value: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The numbers of a CPU tensor or of anything numpy takes, contiguous; copied where they are not float32."""
    return np.ascontiguousarray(value.detach().float().numpy() if _is_torch(value) else value, dtype=np.float32)


def _is_torch(value: object) -> bool:
    return hasattr(value, "data_ptr") and hasattr(value, "new_empty")


def _check_dtype(dtype: str, name: str, dtypes: tuple[str, ...]) -> None:
    if dtype not in dtypes:
        raise InputError(f"{name} is {dtype}; the kernel takes {', '.join(dtypes)}: convert it, e.g. to {dtypes[0]}")


# Filled as they are met: text made from torch's objects, which a decode step would otherwise make hundreds of times.
_dtype_names: dict[object, str] = {}
_strided_layouts: set[object] = set()


def _torch_view(tensor: Any, name: str, dtypes: tuple[str, ...], contiguous: bool) -> Array:
    if not tensor.is_cpu:
        if tensor.is_meta:
            raise InputError(f"{name} is on the meta device and holds no numbers: load it first")
        raise InputError(f"{name} is on {tensor.device}; the kernel reads host memory: pass {name}.cpu()")
    if tensor.layout not in _strided_layouts:
        if not str(tensor.layout).endswith("strided"):
            raise InputError(f"{name} has layout {tensor.layout}; pass a dense tensor, {name}.to_dense()")
        _strided_layouts.add(tensor.layout)
    dtype = _dtype_names.get(tensor.dtype) or _dtype_names.setdefault(tensor.dtype, str(tensor.dtype)[len("torch.") :])
    _check_dtype(dtype, name, dtypes)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_neg():  # lazily negated views show other numbers than their memory holds
        tensor = tensor.resolve_neg()
    if contiguous:
        tensor = tensor.contiguous()
    address = _address(tensor, name)
    return Array(tensor, address, tuple(tensor.shape), tensor.stride(), dtype, tensor.element_size())


def _address(tensor: Any, name: str) -> int:
    """Where a tensor's numbers lie; refuses those that only stand for numbers, in a tracer's or a transform's hands."""
    torch = sys.modules["torch"]
    try:
        plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
        # A subclass may say it is on the CPU and have its storage elsewhere or nowhere.
        address = int(tensor.data_ptr()) if plain or tensor.untyped_storage().device.type == "cpu" else 0
    except RuntimeError:  # what torch.func's wrappers answer
        address = 0
    if address == 0 and tensor.numel() > 0:
        raise InputError(
            f"{name} is a {type(tensor).__name__} without memory of its own, as under FakeTensorMode, torch.func "
            "transforms and export; the kernel reads numbers: call it outside of those"
        )
    return address


def _numpy_view(array: np.ndarray[Any, Any], name: str, dtypes: tuple[str, ...], contiguous: bool) -> Array:
    _check_dtype(array.dtype.name, name, dtypes)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    itemsize = array.itemsize
    aligned = array.flags.aligned and all(stride >= 0 and stride % itemsize == 0 for stride in array.strides)
    if not aligned or (contiguous and not array.flags.c_contiguous):
        array = np.array(array, order="C")
    strides = tuple(stride // itemsize for stride in array.strides)
    return Array(array, array.ctypes.data, array.shape, strides, array.dtype.name, itemsize)


def mention_gradient(value: object, name: str) -> None:
    """Says once that gradients end here, where the caller seems to want them: not under `torch.no_grad()`."""
    global _gradient_said
    torch = sys.modules.get("torch")
    if _gradient_said or torch is None or not getattr(value, "requires_grad", False) or not torch.is_grad_enabled():
        return
    _gradient_said = True
    logger.warning("%s requires gradients; the kernel has none, its output is detached: use torch.no_grad()", name)
