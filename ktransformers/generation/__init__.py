"""Prompt in, text out, whole or as a stream; the work itself is transformers' `generate`."""

from ktransformers.generation.assembler import TextAssembler
from ktransformers.generation.context import context_of, warn_beyond_context
from ktransformers.generation.prompt import Message, Prompt, encode
from ktransformers.generation.temperature import draws, sampling
from ktransformers.generation.text import generate_text, stream_text

__all__ = [
    "Message",
    "Prompt",
    "TextAssembler",
    "context_of",
    "draws",
    "encode",
    "generate_text",
    "sampling",
    "stream_text",
    "warn_beyond_context",
]
