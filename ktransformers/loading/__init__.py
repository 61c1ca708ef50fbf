"""Loading a model with its operators in place: transformers loads everything but them, they read their own weights."""

from ktransformers.loading.config import KTransformersConfig
from ktransformers.loading.quantizer import KTransformersQuantizer

__all__ = ["KTransformersConfig", "KTransformersQuantizer"]
