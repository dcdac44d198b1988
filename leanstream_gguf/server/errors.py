"""What goes wrong, as OpenAI's clients expect to read it: one shape, chosen by the exception's type, never by its text."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException as StarletteHTTPException

from ..errors import ArgumentError, InternalError, LeanStreamError

log = logging.getLogger("leanstream")

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; for the metrics


class ContextLengthError(ArgumentError):
    """The prompt has `used` tokens, the context holds `limit`."""

    code = "context_length_exceeded"


class RequestError(ArgumentError):
    """llama_cpp cannot use a value of the request; its reason is in the message."""

    code = "invalid_value"


class ModelUnknownError(ArgumentError):
    """No model of that name is configured."""

    code = "model_not_found"
    http_status = 404


class NoModelError(LeanStreamError):
    """The server runs without a model."""

    code = "no_model"
    http_status = 503


class QueueFullError(LeanStreamError):
    """More requests wait than the settings allow."""

    code = "queue_full"
    http_status = 429


class StoppingError(LeanStreamError):
    """The server is shutting down."""

    code = "stopping"
    http_status = 503


class AccessError(LeanStreamError):
    """A request that is refused for where it comes from or goes to (Host, Origin)."""

    code = "forbidden"
    http_status = 403


class AuthenticationError(LeanStreamError):
    """The API key is missing or wrong."""

    code = "invalid_api_key"
    http_status = 401


class BodyTooLargeError(ArgumentError):
    """The body is larger than `limit` bytes."""

    code = "body_too_large"
    http_status = 413


class TimeoutError_(LeanStreamError):
    """The request did not arrive in time."""

    code = "request_timeout"
    http_status = 408


class GenerationError(InternalError):
    """Computing or sampling failed in a way that has no type of its own."""

    code = "generation"


class Cancelled(Exception):
    """The running generation was asked to end."""


# What llama_cpp and chat templates raise before they generate, for values that a request holds.
REQUEST_MISTAKES = (ValueError, TypeError, LookupError, AssertionError, AttributeError, RecursionError, TemplateError)

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@contextlib.contextmanager
def request_mistakes() -> Iterator[None]:
    """What is raised inside for a value of the request becomes a RequestError."""
    try:
        yield
    except LeanStreamError:
        raise
    except REQUEST_MISTAKES as error:
        raise RequestError(f"the request cannot be served: {str(error) or type(error).__name__}") from error


def body_of(status: int, message: str, code: str | None = None, param: str | None = None, **fields: Any) -> dict[str, Any]:
    """`{"error": {...}}` in OpenAI's shape."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code, **fields}}


def describe(error: BaseException) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body) for an exception; an unexpected one is logged and its text is not given away."""
    if isinstance(error, LeanStreamError):
        fields = {name: value for name in ("used", "limit", "remedy") if (value := getattr(error, name)) is not None}
        return error.http_status, body_of(error.http_status, str(error), error.code, **fields)
    log.error("unexpected error", exc_info=error)
    return 500, body_of(500, f"internal error: {type(error).__name__}", "internal")


def response(error: BaseException) -> JSONResponse:
    """The whole reply for an exception."""
    status, body = describe(error)
    headers = {"Retry-After": "2"} if status in (429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body, status_code=status, headers=headers)


async def _on_error(_: Request, error: Exception) -> JSONResponse:
    return response(error)


async def _on_http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StarletteHTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return JSONResponse(body_of(error.status_code, str(error.detail), code), error.status_code, headers=error.headers)


async def _on_validation(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    text = f"{param}: {first['msg']}" if param else str(first["msg"])
    return JSONResponse(body_of(400, text.encode("utf-8", "replace").decode(), "invalid_value", param), 400)


def install(app: FastAPI) -> None:
    """Make the application's errors answer in this shape; security.Guard does so for the unexpected ones."""
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(StarletteHTTPException, _on_http)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(LeanStreamError, _on_error)
