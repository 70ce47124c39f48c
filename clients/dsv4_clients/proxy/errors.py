"""Errors of the HTTP API in OpenAI's shape, and how engine errors become HTTP statuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dsv4.errors import ErrorCode, RequestError

RETRY_AFTER_SECONDS = 1

_FIELD_FIRST = re.compile(r"(?P<field>[A-Za-z_]\w*(?:\[\d+\]|\.\w+)*): ")
_TYPE_BY_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "request_cancelled",
    503: "service_unavailable_error",
    504: "timeout_error",
}

_ANTHROPIC_TYPE_BY_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """One HTTP request fails with `status` and OpenAI's error object.

    `code` is a stable lower-case word, `param` the JSON path of the field at fault.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        return _TYPE_BY_STATUS.get(self.status, "server_error")

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """Anthropic's error object, `{"type": "error", "error": {"type", "message"}}`."""
        kind = _ANTHROPIC_TYPE_BY_STATUS.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    @classmethod
    def from_request_error(cls, error: RequestError) -> ApiError:
        """The HTTP form of an engine error. 429 and 503 say when to come back."""
        status = error.code.http_status
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status in (429, 503) else None
        return cls(
            status,
            error.message,
            code=error.code.value.lower(),
            param=error.field or _leading_field(error.message),
            headers=headers,
        )


def as_api_error(error: Exception) -> ApiError:
    """Any exception as an ApiError; what was not raised on purpose becomes a 500 without its text."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError.from_request_error(error)
    return ApiError(500, "The proxy failed on this request; its log has the reason.", code="internal")


def invalid(param: str, message: str) -> ApiError:
    """A 400 whose message starts with the field's path."""
    return ApiError(400, f"{param}: {message}", code=ErrorCode.INVALID_ARGUMENT.value.lower(), param=param)


def unsupported(param: str, message: str) -> ApiError:
    """A 400 for a field that is understood but not offered."""
    return ApiError(400, f"{param}: {message}", code=ErrorCode.UNSUPPORTED.value.lower(), param=param)


def _leading_field(message: str) -> str | None:
    match = _FIELD_FIRST.match(message)
    return match["field"] if match else None
