"""API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dsv4_clients.proxy.errors import ApiError
from dsv4_clients.proxy.http_json import error_response

OPEN_PATHS = frozenset({"/", "/health", "/health/ready"})
"""The page without content of anybody, and what probes ask without credentials."""


class AuthenticationMiddleware:
    """Asks for `Authorization: Bearer KEY` (or Anthropic's `x-api-key`) when there are keys.

    Keys are compared as digests, all of them every time, so the time taken tells nothing.
    The number of the key that matched is kept in the scope's state as `api_key_index`.
    """

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._digests or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        index = self._match(_presented_key(Headers(scope=scope)))
        if index is None:
            error = ApiError(
                401,
                "A valid API key is needed: send the header Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(error, scope["path"])(scope, receive, send)
            return
        scope.setdefault("state", {})["api_key_index"] = index
        await self._app(scope, receive, send)

    def _match(self, key: str) -> int | None:
        presented = _digest(key.encode("latin-1"))  # header values are decoded as latin-1: the bytes as they came
        found = None
        for index, digest in enumerate(self._digests):
            if hmac.compare_digest(presented, digest):
                found = index
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _presented_key(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return headers.get("x-api-key", "")
