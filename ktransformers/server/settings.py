"""From a request to what `generate` gets: sampling, limits, penalties."""

from __future__ import annotations

import copy

from transformers import GenerationConfig, LogitsProcessorList

from ktransformers.generation import draws
from ktransformers.server.errors import ApiError
from ktransformers.server.processors import CountPenalty, NumbersOnly
from ktransformers.server.schema import Request
from ktransformers.server.served import ServedModel

__all__ = ["generation_config", "logits_processors", "stop_strings"]

_UNLIMITED = 1 << 20  # tokens; for models that tell no context length


def generation_config(request: Request, served: ServedModel, prompt_tokens: int) -> GenerationConfig:
    """The model's own generation config with what the request changes. End tokens are always the model's.

    Raises `ApiError` for a prompt that fills the context, and for more tokens than the context has. An answer that fits
    the context alone but not behind this prompt ends where the context does.
    """
    config = copy.deepcopy(served.model.generation_config) or GenerationConfig()
    given = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        if (value := getattr(request, name)) is not None
    }
    config.update(**given)
    config.do_sample = _samples(request, config)
    if config.do_sample and config.top_k is None:
        config.top_k = 0  # or transformers would look at the 50 likeliest only, which nobody asked for
    if not config.do_sample:  # or transformers warns that they do nothing
        config.temperature = config.top_p = config.top_k = config.min_p = None
    if request.logit_bias:
        config.sequence_bias = [[[_token(key, served)], bias] for key, bias in request.logit_bias.items()]
    config.max_length = config.stop_strings = None  # those are ours to look for
    config.num_beams = config.num_return_sequences = 1  # one text, as it is written
    config.max_new_tokens = _room(request, served.context, prompt_tokens)
    if config.pad_token_id is None:
        ends = config.eos_token_id
        config.pad_token_id = ends[0] if isinstance(ends, list) else ends
    return config


def stop_strings(request: Request, served: ServedModel) -> list[str]:
    """The request's, and those of the model itself."""
    own = getattr(served.model.generation_config, "stop_strings", None) or []
    return [*(request.stop or []), *([own] if isinstance(own, str) else own)]


def logits_processors(request: Request, prompt_tokens: int) -> LogitsProcessorList:
    """Ours. transformers adds its own for what the generation config says."""
    processors = LogitsProcessorList([NumbersOnly()])
    if request.frequency_penalty or request.presence_penalty:
        frequency, presence = request.frequency_penalty or 0.0, request.presence_penalty or 0.0
        processors.append(CountPenalty(prompt_tokens, frequency=frequency, presence=presence))
    return processors


def _samples(request: Request, config: GenerationConfig) -> bool:
    """A temperature decides, then `do_sample`; without them what only sampling can obey; else the model."""
    if request.temperature is not None:
        return draws(request.temperature)
    if request.do_sample is not None:
        return request.do_sample
    narrowed = any(getattr(request, name) is not None for name in ("top_p", "top_k", "min_p"))
    return narrowed or bool(config.do_sample)


def _room(request: Request, context: int | None, prompt_tokens: int) -> int:
    asked = request.token_limit
    if context is None:
        return asked or _UNLIMITED
    if prompt_tokens >= context:
        raise ApiError(
            f"the prompt has {prompt_tokens} tokens, the limit of prompt and answer together is {context}",
            param=request.prompt_field,
            code="context_length_exceeded",
        )
    if asked is not None and asked > context:
        raise ApiError(
            f"{asked} tokens were asked for, the limit of prompt and answer together is {context}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return min(asked or context, context - prompt_tokens)


def _token(key: str, served: ServedModel) -> int:
    vocabulary = served.model.config.get_text_config().vocab_size
    if not key.isdecimal() or int(key) >= vocabulary:
        raise ApiError(f'logit_bias: "{key}" is no token id of this model (0 to {vocabulary - 1})', param="logit_bias")
    return int(key)
