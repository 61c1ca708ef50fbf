"""Requests: their fields, and in words what is wrong with one. Nothing that a client asks for is dropped in silence."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ktransformers.hints import nearest
from ktransformers.server.errors import ApiError
from ktransformers.server.foreign import FIELD, unfold

__all__ = ["ChatRequest", "CompletionRequest", "Request", "StreamOptions", "read"]

# Fields that say something about the client or its billing: they are accepted and change no answer anywhere.
_ABOUT_THE_CLIENT = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"}
)

# Fields of the OpenAI API that would change the answer and are not done here: the values that ask for nothing, and why.
_NOT_HERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "this model writes text"),
    "best_of": ((1,), "one text is written; send the request again for another"),
    "echo": ((False,), "the prompt is not repeated"),
    "function_call": (("auto", "none"), "send tools and tool_choice"),
    "functions": (([],), "send tools"),
    "logprobs": ((False, 0), "probabilities are not told"),
    "modalities": ((["text"],), "this model writes text"),
    "n": ((1,), "one answer is written; send the request again for another"),
    "parallel_tool_calls": ((True,), "the model decides how many tools it calls"),
    "prediction": ((), "answers are not predicted"),
    "response_format": (({"type": "text"},), "the answer is free text"),
    "suffix": (("",), "text is only continued, not filled in"),
    "top_logprobs": ((0,), "probabilities are not told"),
    "verbosity": (("medium",), "say it in a message"),
    "web_search_options": ((), "nothing is searched"),
}

Tokens = Annotated[int, Field(ge=1)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    """`include_usage`: one last chunk with the token counts and no choice. `include_obfuscation` is OpenAI's own."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Message(BaseModel):
    """A message as chat templates get it: all keys kept, text parts joined by a line break."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[str, Field(min_length=1)]
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f'parts have to be {{"type": "text", "text": …}}; this model reads no "{kind}"')
        return "\n".join(part["text"] for part in content)

    def for_template(self) -> dict[str, Any]:
        """The dictionary; arguments of tool calls parsed, since templates walk through them."""
        message = self.model_dump(exclude_unset=True)
        if self.tool_calls:
            message["content"] = self.content or ""
            message["tool_calls"] = [_with_parsed_arguments(call) for call in self.tool_calls]
        elif self.content is None:
            raise ApiError(f"the content of a message of role {self.role} is missing or null", param="messages")
        return message


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except ValueError as error:
        raise ApiError(f"the arguments of a tool call are not JSON: {error}", param="messages") from error


class Request(_Strict):
    """What both endpoints know. A field left out, or null, is as the model's own generation config has it."""

    prompt_field: ClassVar[str]

    model: str | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: list[Annotated[str, Field(min_length=1)]] | None = Field(default=None, max_length=16)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    do_sample: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _as_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def token_limit(self) -> int | None:
        """How many tokens the answer may have at most, as the client says."""
        return self.max_tokens


class ChatRequest(Request):
    """`/v1/chat/completions`. `chat_template_kwargs` are variables for the chat template."""

    prompt_field = "messages"

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Tokens | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens` is the newer name and goes first."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Request):
    """`/v1/completions`: one prompt, as text or as token ids."""

    prompt_field = "prompt"

    prompt: str | list[int]

    @field_validator("prompt", mode="before")
    @classmethod
    def _only_one(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not ids and not isinstance(prompt, str):
            raise ValueError("one text, or one list of token ids; send a request for each prompt")
        return prompt


R = TypeVar("R", bound=Request)


def read(kind: type[R], body: dict[str, Any]) -> R:
    """The request in `body`. Raises `ApiError` (400) that names the field."""
    fields = unfold({name: value for name, value in body.items() if name not in _ABOUT_THE_CLIENT})
    for name, (harmless, why) in _NOT_HERE.items():
        value = fields.pop(name, None)
        if value is not None and value not in harmless:
            raise ApiError(f"{name} is not supported: {why}", param=name, code="unsupported_parameter")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _in_words(error, kind) from error


def _in_words(error: ValidationError, kind: type[Request]) -> ApiError:
    first, count = error.errors()[0], error.error_count()
    place = ".".join(str(step) for step in first["loc"])
    more = f" (and {count - 1} more)" if count > 1 else ""
    if first["type"] == "extra_forbidden":
        close = nearest(str(first["loc"][-1]), (*kind.model_fields, FIELD))
        hint = f'; did you mean "{close[0]}"?' if close and len(first["loc"]) == 1 else ""
        return ApiError(f'unknown field "{place}"{hint}{more}', param=place, code="unknown_parameter")
    cause = first.get("ctx", {}).get("error")
    text = str(cause) if isinstance(cause, ValueError) else first["msg"]
    return ApiError(f"{place}: {text[:1].lower()}{text[1:]}{more}", param=place)
