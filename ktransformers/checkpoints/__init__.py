"""Where weights come from: found offline, checked before they are read, read by transformers or module by module."""

from ktransformers.checkpoints.decoded import DecodedFiles, open_files
from ktransformers.checkpoints.floats import FloatsOf, FloatSource, FreedFloats
from ktransformers.checkpoints.headers import CheckpointFiles, read_files, read_headers
from ktransformers.checkpoints.load import load_model, load_tokenizer
from ktransformers.checkpoints.locate import locate
from ktransformers.checkpoints.origin import FolderOrigin, Origin, open_origin
from ktransformers.checkpoints.preflight import verify_complete
from ktransformers.checkpoints.source import CheckpointModule, CheckpointSource, open_source

__all__ = [
    "CheckpointFiles",
    "CheckpointModule",
    "CheckpointSource",
    "DecodedFiles",
    "FloatSource",
    "FloatsOf",
    "FolderOrigin",
    "FreedFloats",
    "Origin",
    "load_model",
    "load_tokenizer",
    "locate",
    "open_files",
    "open_origin",
    "open_source",
    "read_files",
    "read_headers",
    "verify_complete",
]
