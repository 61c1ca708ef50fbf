"""The architectures of GGUF files that are read with tables of our own."""

from ktransformers.checkpoints.gguf.architectures.base import Architecture, Made, TensorName
from ktransformers.checkpoints.gguf.architectures.deepseek import DEEPSEEK2
from ktransformers.checkpoints.gguf.architectures.glm4_moe import GLM4_MOE
from ktransformers.checkpoints.gguf.architectures.gpt_oss import GPT_OSS
from ktransformers.checkpoints.gguf.architectures.granite_moe import GRANITE_MOE
from ktransformers.checkpoints.gguf.architectures.llama import LLAMA
from ktransformers.checkpoints.gguf.architectures.olmoe import OLMOE
from ktransformers.checkpoints.gguf.architectures.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE

__all__ = ["ARCHITECTURES", "Architecture", "Made", "TensorName"]

ARCHITECTURES = {
    entry.name: entry
    for entry in (DEEPSEEK2, GLM4_MOE, GPT_OSS, GRANITE_MOE, LLAMA, OLMOE, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE)
}
"""By `general.architecture`."""
