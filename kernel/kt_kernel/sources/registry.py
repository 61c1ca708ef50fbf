"""The schemes by the names that configurations give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kt_kernel.errors import WeightsError, did_you_mean
from kt_kernel.sources.awq import Awq
from kt_kernel.sources.base import Scheme
from kt_kernel.sources.compressed_tensors import CompressedTensors
from kt_kernel.sources.fp4 import Mxfp4
from kt_kernel.sources.fp8 import Fp8
from kt_kernel.sources.gptq import Gptq

__all__ = ["is_read", "scheme_for"]

_SCHEMES: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}


def is_read(quantization_config: Mapping[str, Any]) -> bool:
    """Whether the quant_method is one of those; a variant of it may still not be."""
    return quantization_config.get("quant_method") in _SCHEMES


def scheme_for(quantization_config: Mapping[str, Any]) -> Scheme:
    """The reader of a checkpoint with this `quantization_config`.

    Raises `WeightsError` that lists what is read, for an unknown quant_method or a variant of it that is not.
    """
    method = quantization_config.get("quant_method")
    if method not in _SCHEMES:
        raise WeightsError(
            f"the checkpoint is quantised by {method!r}{did_you_mean(str(method), _SCHEMES)}; read are "
            f"{', '.join(_SCHEMES)}: pass the float checkpoint, or one of these"
        )
    return _SCHEMES[method](quantization_config)
