"""The two endpoints: transformers' handlers for the wire format, our engine for the work."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar, cast

import torch
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletionChunk
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import (
    BaseHandler,
    GenerationState,
    ReasoningText,
    ToolCall,
    build_response_parser,
    get_response_template,
)

from ktransformers.generation import encode
from ktransformers.log import get_logger
from ktransformers.server.engine import Engine
from ktransformers.server.errors import ApiError
from ktransformers.server.job import Job, Parser
from ktransformers.server.schema import ChatRequest, CompletionRequest, Request, read
from ktransformers.server.served import ServedModel
from ktransformers.server.settings import generation_config, logits_processors, stop_strings

__all__ = ["ChatHandler", "TextHandler"]

log = get_logger("server")

R = TypeVar("R", bound=Request)

# Arguments of the tokenizer, which would end up there together with a template's variables.
_NOT_VARIABLES = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
_DONE = "data: [DONE]\n\n"  # ends every stream of the OpenAI API that went well


class _Handler(BaseHandler, Generic[R]):
    """What both endpoints do. transformers' own `handle_request` would load models, drop fields it does not know how to
    obey, and go on computing for clients that have left.
    """

    _kind: type[R]

    def __init__(self, served: ServedModel, engine: Engine) -> None:
        super().__init__(cast(Any, served), GenerationState())
        self._served = served
        self._engine = engine

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        """The answer, or the stream of its pieces. Raises `ApiError` before anything is computed."""
        request = read(self._kind, body)
        self._served.check_name(request.model)
        if request.stream_options is not None and not request.stream:
            raise ApiError("stream_options is only for a request with stream: true", param="stream_options")
        input_ids = await asyncio.to_thread(self._encode, request)
        job = Job(
            request_id,
            input_ids,
            generation_config(request, self._served, input_ids.shape[-1]),
            logits_processors(request, input_ids.shape[-1]),
            self._served.tokenizer,
            seed=request.seed,
            stops=stop_strings(request, self._served),
            parser=self._parser(request, input_ids),
        )
        self._engine.submit(job)
        if request.stream:
            return _JobStream(job, self._events(request, job))
        return await self._whole(job)

    def _encode(self, request: R) -> torch.Tensor:
        """(1, tokens) of the prompt."""
        raise NotImplementedError

    def _parser(self, request: R, input_ids: torch.Tensor) -> Parser | None:  # noqa: ARG002
        return None

    async def _whole(self, job: Job) -> Response:
        raise NotImplementedError

    def _chunks(self, job: Job) -> AsyncIterator[str]:
        """The events of a stream that goes well, but for usage and the very last one."""
        raise NotImplementedError

    def _usage_chunk(self, job: Job) -> str:
        raise NotImplementedError

    async def _events(self, request: R, job: Job) -> AsyncIterator[str]:
        try:
            async for event in self._chunks(job):
                yield event
            if request.wants_usage:
                yield self._usage_chunk(job)
            yield _DONE
            _note(job)
        except ApiError as error:  # the status 200 is long sent
            yield f"data: {json.dumps(error.body)}\n\n"


class ChatHandler(_Handler[ChatRequest], ChatCompletionHandler):  # type: ignore[misc]
    """`/v1/chat/completions`."""

    _kind = ChatRequest

    def _encode(self, request: ChatRequest) -> torch.Tensor:
        tokenizer = self._served.tokenizer
        if not tokenizer.chat_template:
            raise ApiError(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE",
                param="messages",
                code="no_chat_template",
            )
        variables = dict(request.chat_template_kwargs or {})
        if taken := sorted(variables.keys() & _NOT_VARIABLES):
            raise ApiError(f"{', '.join(taken)} is no variable of a chat template", param="chat_template_kwargs")
        tools = None if request.tool_choice == "none" else request.tools or None
        for field, value in (("tools", tools), ("reasoning_effort", request.reasoning_effort)):
            if value is not None:
                self._check_template_knows(field)
                variables[field] = value
        messages = [message.for_template() for message in request.messages]
        try:
            encoded = encode(tokenizer, messages, chat=True, device=torch.device("cpu"), **variables)
        except TemplateError as error:
            raise ApiError(f"the model's chat template refuses these messages: {error}", param="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ApiError(f"the messages cannot be made a prompt: {error}", param="messages") from error
        return encoded["input_ids"]

    def _check_template_knows(self, field: str) -> None:
        template = self._served.tokenizer.get_chat_template(tools=[] if field == "tools" else None)
        if not re.search(rf"\b{field}\b", template):
            raise ApiError(f"{field}: the chat template of this model has no place for it", param=field)

    def _parser(self, request: ChatRequest, input_ids: torch.Tensor) -> Parser | None:
        """transformers' parser for the model's family, where the prompt is of the form it describes.

        Without the anchor in the prompt the parser would take the whole prompt for the beginning of the answer.
        """
        model, tokenizer = self._served.model, self._served.tokenizer
        anchors = (get_response_template(tokenizer, model) or {}).get("start_anchor")
        if anchors is not None:
            prompt = tokenizer.decode(input_ids[0])
            if not any(anchor in prompt for anchor in ([anchors] if isinstance(anchors, str) else anchors)):
                return None
        return build_response_parser(tokenizer, model, input_ids, tools=request.tools)

    async def _whole(self, job: Job) -> Response:
        text, reasoning, calls = "", "", []
        async for piece in job:
            if isinstance(piece, ToolCall):
                calls.append(piece)
            elif isinstance(piece, ReasoningText):
                reasoning += piece
            else:
                text += piece
        _note(job)
        answer = self._build_completion(
            job.request_id,
            text,
            self._served.name,
            finish_reason="tool_calls" if calls else job.finish_reason,
            usage=_usage(job),
            tool_calls=[_call(job, index, call) for index, call in enumerate(calls)] or None,
            reasoning_content=reasoning or None,
        )
        return JSONResponse(answer)

    async def _chunks(self, job: Job) -> AsyncIterator[str]:
        name, calls = self._served.name, 0
        yield self._build_chunk_sse(job.request_id, role="assistant", content="", model=name)
        async for piece in job:
            if isinstance(piece, ToolCall):
                call = {"index": calls, **_call(job, calls, piece)}
                calls += 1
                yield self._build_chunk_sse(job.request_id, model=name, tool_calls=[call])
            elif isinstance(piece, ReasoningText):
                yield self._build_chunk_sse(job.request_id, model=name, reasoning_content=piece)
            else:
                yield self._build_chunk_sse(job.request_id, model=name, content=piece)
        reason = "tool_calls" if calls else job.finish_reason
        yield self._build_chunk_sse(job.request_id, model=name, finish_reason=reason)

    def _usage_chunk(self, job: Job) -> str:
        chunk = ChatCompletionChunk(
            id=job.request_id,
            created=int(time.time()),
            model=self._served.name,
            choices=[],
            usage=_usage(job),
            object="chat.completion.chunk",
        )
        return str(self.chunk_to_sse(chunk))


class TextHandler(_Handler[CompletionRequest], CompletionHandler):  # type: ignore[misc]
    """`/v1/completions`."""

    _kind = CompletionRequest

    def _encode(self, request: CompletionRequest) -> torch.Tensor:
        if isinstance(request.prompt, list):
            return self._as_ids(request.prompt)
        try:
            encoded = encode(self._served.tokenizer, request.prompt, chat=False, device=torch.device("cpu"))
        except (TypeError, ValueError) as error:
            raise ApiError(str(error), param="prompt") from error
        return encoded["input_ids"]

    def _as_ids(self, ids: list[int]) -> torch.Tensor:
        vocabulary = self._served.model.config.get_text_config().vocab_size
        if not ids or min(ids) < 0 or max(ids) >= vocabulary:
            raise ApiError(f"prompt: one token id or more, each from 0 to {vocabulary - 1}", param="prompt")
        return torch.tensor([ids])

    async def _whole(self, job: Job) -> Response:
        text = "".join([piece async for piece in job])
        _note(job)
        answer = Completion(
            id=job.request_id,
            created=int(time.time()),
            model=self._served.name,
            choices=[CompletionChoice(text=text, index=0, finish_reason=job.finish_reason)],
            object="text_completion",
            usage=_usage(job),
        )
        return JSONResponse(answer.model_dump(exclude_none=True))

    async def _chunks(self, job: Job) -> AsyncIterator[str]:
        async for piece in job:
            yield self._build_chunk_sse(job.request_id, self._served.name, text=piece)
        yield self._build_chunk_sse(job.request_id, self._served.name, finish_reason=job.finish_reason)

    def _usage_chunk(self, job: Job) -> str:
        chunk = Completion.model_construct(
            id=job.request_id,
            object="text_completion",
            created=int(time.time()),
            model=self._served.name,
            choices=[],
            usage=_usage(job),
        )
        return str(self.chunk_to_sse(chunk))


class _JobStream(StreamingResponse):
    """A stream that cancels its job when it ends, even where it ends before its first event."""

    def __init__(self, job: Job, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._job = job

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


def _call(job: Job, index: int, call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"{job.request_id}_tool_call_{index}", "type": "function", "function": function}


def _usage(job: Job) -> CompletionUsage:
    return CompletionUsage(
        prompt_tokens=job.prompt_tokens,
        completion_tokens=job.tokens,
        total_tokens=job.prompt_tokens + job.tokens,
    )


def _note(job: Job) -> None:
    seconds = time.perf_counter() - job.started
    words = f"{job.prompt_tokens} tokens in, {job.tokens} out, {seconds:.1f} s with waiting, {job.finish_reason}"
    log.info("request %s: %s", job.request_id, words)
