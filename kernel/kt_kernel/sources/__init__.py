"""Quantised checkpoints: one reader a storage scheme, chosen by the `quantization_config` of a model's config.json."""

from kt_kernel.sources.base import Parts, Scheme, Weight, as_numpy
from kt_kernel.sources.registry import is_read, scheme_for

__all__ = ["Parts", "Scheme", "Weight", "as_numpy", "is_read", "scheme_for"]
