"""Bounded request bodies, in size and in time."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsv4_clients.proxy.errors import ApiError
from dsv4_clients.proxy.http_json import error_response
from dsv4_clients.proxy.tasks import run_within

DISCARD_FACTOR = 4
"""Up to this many times the limit a body is read and dropped: many clients read no answer before they have sent it."""


class BodyLimitMiddleware:
    """Reads the whole body before the application starts: 413 when it is too large, 408 when it takes too long."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_seconds = timeout_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None when the client hung up."""
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length) > DISCARD_FACTOR * self._max_bytes:
            raise self._too_large()
        try:
            return await run_within(self._timeout_seconds, self._collect(receive))
        except asyncio.TimeoutError:
            message = f"The request body did not arrive within {self._timeout_seconds:g} s."
            raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None

    async def _collect(self, receive: Receive) -> bytes | None:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            is_last = not message.get("more_body", False)
            if size > self._max_bytes:
                parts.clear()
                if is_last or size > DISCARD_FACTOR * self._max_bytes:
                    raise self._too_large()
                continue
            parts.append(part)
            if is_last:
                return b"".join(parts)

    def _too_large(self) -> ApiError:
        message = f"The request body is larger than {self._max_bytes} bytes."
        return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once and then what the connection gives: its end."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
