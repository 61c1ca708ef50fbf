"""Where weights come from: found offline, checked before they are read, loaded whole, one layer's floats read again."""

from ktransformers.checkpoints.floats import reload_module
from ktransformers.checkpoints.headers import CheckpointFiles, read_headers
from ktransformers.checkpoints.load import load_model, load_tokenizer
from ktransformers.checkpoints.locate import locate
from ktransformers.checkpoints.preflight import verify_complete

__all__ = [
    "CheckpointFiles",
    "load_model",
    "load_tokenizer",
    "locate",
    "read_headers",
    "reload_module",
    "verify_complete",
]
