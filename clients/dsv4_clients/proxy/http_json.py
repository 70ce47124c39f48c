"""JSON responses and the parts of their documentation that all endpoints share."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.responses import Response

from dsv4_clients.proxy.errors import ApiError
from dsv4_clients.proxy.schemas.common import ErrorResponse

Documentation = dict[int | str, dict[str, Any]]

ANTHROPIC_PATHS = "/v1/messages"

_DESCRIPTIONS = {
    400: "The request is wrong or asks for what is not offered; `param` names the field",
    401: "No valid API key",
    404: "The model is not served here",
    408: "The request body did not arrive in time",
    413: "The request body is too large",
    429: "Too many requests; `Retry-After` says when to come back",
    500: "The server failed",
    503: "The engine is down, starting or draining",
    504: "The request's deadline passed",
}


def error_documentation(*statuses: int) -> Documentation:
    """OpenAPI entries for error statuses."""
    return {status: {"model": ErrorResponse, "description": _DESCRIPTIONS[status]} for status in statuses}


GENERATION_ERRORS = error_documentation(*_DESCRIPTIONS)


def with_model(documentation: Documentation, model: type[BaseModel]) -> Documentation:
    """The same statuses with another error body."""
    return {status: {**entry, "model": model} for status, entry in documentation.items()}


def with_event_stream(model: type[BaseModel], events: str) -> dict[str, Any]:
    """OpenAPI entry of a success that is an object, or an event stream when `stream` is true."""
    return {
        "model": model,
        "description": f"The answer; with `stream` set to true, server-sent {events}",
        "content": {"text/event-stream": {"schema": {"description": f"Server-sent {events}"}}},
    }


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON body as it is, without running it through a schema again."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_response(error: ApiError, path: str) -> Response:
    """The error in the shape of the API that `path` belongs to."""
    body = error.anthropic_body() if path.startswith(ANTHROPIC_PATHS) else error.body()
    return json_response(body, error.status, error.headers)
