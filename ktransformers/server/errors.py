"""Errors as clients of the OpenAI API expect them: `{"error": {"message", "type", "param", "code"}}` and a status."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from ktransformers.errors import KTransformersError
from ktransformers.log import get_logger

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

__all__ = ["ApiError", "answer_errors"]


log = get_logger("server")


class ApiError(KTransformersError):
    """A request that is not answered as it wished. `param` is the field that is wrong, `code` a word for programs."""

    def __init__(
        self,
        message: str,
        *,
        status: int = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = int(status)
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer, also of the last event of a stream that fails."""
        kind = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def answer_errors(app: FastAPI) -> None:
    """Makes every error of `app` an answer of that shape: ours, FastAPI's and Starlette's."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    def respond(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, status_code=error.status, headers=error.headers)

    async def ours(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return respond(error)

    async def not_json(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return respond(ApiError(_why_unread(error.errors())))

    async def routing(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        asked = f"{request.method} {request.url.path}"
        texts = {
            HTTPStatus.NOT_FOUND: f"there is no {asked} here; there is {_paths(app)}",
            HTTPStatus.METHOD_NOT_ALLOWED: f"{asked}: this path is not for {request.method}",
        }
        text = texts.get(HTTPStatus(error.status_code), str(error.detail))
        return respond(ApiError(text, status=error.status_code, headers=dict(error.headers or {})))

    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        log.error("a request failed: %s: %s", type(error).__name__, error)
        log.debug("its traceback", exc_info=error)
        text = f"the server failed: {type(error).__name__}: {error}"
        return respond(ApiError(text, status=HTTPStatus.INTERNAL_SERVER_ERROR))

    app.add_exception_handler(ApiError, ours)
    app.add_exception_handler(Exception, unexpected)
    app.add_exception_handler(RequestValidationError, not_json)
    app.add_exception_handler(HTTPException, routing)


def _why_unread(problems: Any) -> str:
    """In words: a body that is no JSON object at all. Its fields are checked later, by us."""
    first = problems[0] if problems else {}
    if first.get("type") == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return f"the body is not JSON: {reason} at character {first['loc'][-1]}"
    return "the body has to be a JSON object, sent with the header content-type: application/json"


def _paths(app: FastAPI) -> str:
    return ", ".join(sorted({path for route in app.routes if (path := getattr(route, "path", None))}))
