"""Forecasts of a model whose linears are on the kernel too."""

from __future__ import annotations

import ktransformers
from ktransformers.injection import build_meta_model
from ktransformers.operators.base import BaseInjectedModule
from tests import models


def test_packed_linears_are_counted_as_they_come_out_and_a_tied_embedding_stays() -> None:
    model = models.make_qwen3_moe(tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight.nbytes
    rules = "cpu-only"
    forecast = ktransformers.forecast(build_meta_model(model.config), rules)
    ktransformers.inject(model, rules, keep_float=False)
    operators = [module for module in model.modules() if isinstance(module, BaseInjectedModule)]
    told = {h.what: h.nbytes for h in forecast.holdings}
    packed = dict.fromkeys(("KTransformersLinear", "KTransformersExperts"), 0)
    for operator in operators:
        packed[type(operator).__name__] += int(operator.describe()["bytes"])
    assert told["packed experts"] == packed["KTransformersExperts"]
    assert told["packed linears"] == packed["KTransformersLinear"]
    others = sum(p.nbytes for p in model.parameters() if not p.is_meta)
    assert told["other weights"] == others
    assert others > embedding
