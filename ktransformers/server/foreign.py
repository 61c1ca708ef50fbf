"""`transformers chat` sends a whole generation config as a JSON text. What in it asks for something become fields."""

from __future__ import annotations

import json
from typing import Any

from transformers import GenerationConfig

from ktransformers.server.errors import ApiError

__all__ = ["FIELD", "unfold"]

FIELD = "generation_config"

# The rest would ask for more than one text, another cache or other end tokens.
_AS_FIELDS = {name: name for name in ("do_sample", "min_p", "repetition_penalty", "temperature", "top_k", "top_p")}
_AS_FIELDS["max_new_tokens"] = "max_tokens"
_SAYS_NOTHING = frozenset({"transformers_version"})


def unfold(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` with the config's settings in the place of the config. A field that the request has itself goes first.

    Raises `ApiError` (400) for what is no config, and for settings other than those of sampling and length.
    """
    text = fields.get(FIELD)
    if text is None:
        return {name: value for name, value in fields.items() if name != FIELD}
    try:
        config = json.loads(text)
    except (TypeError, ValueError) as error:
        raise ApiError(f"{FIELD} has to be a text that holds JSON: {error}", param=FIELD) from error
    if not isinstance(config, dict):
        raise ApiError(f"{FIELD} has to hold a JSON object", param=FIELD)
    defaults = GenerationConfig().to_dict()
    asked = {name: value for name, value in config.items() if value is not None and value != defaults.get(name)}
    refused = sorted(asked.keys() - _AS_FIELDS.keys() - _SAYS_NOTHING)
    if refused:
        known = ", ".join(sorted(_AS_FIELDS))
        raise ApiError(f"{FIELD}: {', '.join(refused)} cannot be set here; {known} can", param=FIELD)
    unfolded = {_AS_FIELDS[name]: value for name, value in asked.items() if name in _AS_FIELDS}
    return unfolded | {name: value for name, value in fields.items() if name != FIELD}
