"""A model from a GGUF file with transformers alone: no operator of ours takes part."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from ktransformers.checkpoints.gguf import GgufModel, find_gguf
from ktransformers.injection import build_meta_model


def load(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    files = find_gguf(path)
    assert files is not None
    opened = GgufModel.open(files)
    meta = build_meta_model(opened.config)
    state = opened.weights(meta, dtype).state()
    model: PreTrainedModel = type(meta).from_pretrained(None, config=opened.config, state_dict=state, dtype=dtype)
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(3, 40).reshape(1, -1) * 5 % 250
    with torch.no_grad():
        result: torch.Tensor = model(ids).logits
    return result
