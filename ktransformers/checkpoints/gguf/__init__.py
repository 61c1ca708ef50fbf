"""Models from GGUF files: configuration, tokenizer, chat template and weights from the one file."""

from ktransformers.checkpoints.gguf.checkpoint import GgufCheckpoint, open_gguf
from ktransformers.checkpoints.gguf.files import find_gguf
from ktransformers.checkpoints.gguf.model import GgufModel, load_gguf
from ktransformers.checkpoints.gguf.weights import GgufWeights

__all__ = ["GgufCheckpoint", "GgufModel", "GgufWeights", "find_gguf", "load_gguf", "open_gguf"]
