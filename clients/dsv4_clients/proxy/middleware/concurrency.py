"""Limits on generation requests at once."""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Receive, Scope, Send

from dsv4_clients.proxy.errors import RETRY_AFTER_SECONDS, ApiError
from dsv4_clients.proxy.http_json import error_response

GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})


class ConcurrencyMiddleware:
    """429 with Retry-After for a generation request above the limit. A stream counts until its last byte."""

    def __init__(self, app: ASGIApp, *, limit: int | None, limit_per_key: int | None) -> None:
        self._app = app
        self._limit = limit
        self._limit_per_key = limit_per_key
        self._running = 0
        self._running_by_key: Counter[int | None] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in GENERATION_PATHS:
            await self._app(scope, receive, send)
            return
        key = scope.get("state", {}).get("api_key_index")
        error = self._refusal(key)
        if error is not None:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        self._running += 1
        self._running_by_key[key] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1
            self._running_by_key[key] -= 1

    def _refusal(self, key: int | None) -> ApiError | None:
        if self._limit is not None and self._running >= self._limit:
            message = f"{self._limit} requests are being answered, which is the limit of this server."
        elif self._limit_per_key is not None and self._running_by_key[key] >= self._limit_per_key:
            message = f"{self._limit_per_key} requests of this API key are being answered, which is its limit."
        else:
            return None
        return ApiError(429, message, code="too_many_requests", headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
