"""Models from GGUF files: configuration, tokenizer, chat template and weights from the one file."""

from ktransformers.checkpoints.gguf.checkpoint import GgufCheckpoint, open_gguf
from ktransformers.checkpoints.gguf.files import find_gguf
from ktransformers.checkpoints.gguf.model import GgufModel

__all__ = ["GgufCheckpoint", "GgufModel", "find_gguf", "open_gguf"]
