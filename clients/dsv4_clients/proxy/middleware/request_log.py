"""Request ids and the access log."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from datetime import datetime, timezone

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ACCESS_LOGGER = "dsv4_clients.access"
REQUEST_ID_HEADER = "x-request-id"

_USABLE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestLogMiddleware:
    """Gives every response an `x-request-id` (the client's own, if it is usable) and writes one JSON line for it.

    The line has no query string, no headers and no content.
    """

    def __init__(self, app: ASGIApp, *, enabled: bool) -> None:
        self._app = app
        self._enabled = enabled
        self._log = logging.getLogger(ACCESS_LOGGER)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        request_id = _request_id(scope)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        status = 499
        sent_bytes = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status, sent_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            elif message["type"] == "http.response.body":
                sent_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._enabled:
                if state.get("client_disconnected"):
                    status = 499
                self._write(scope, request_id, status, sent_bytes, time.monotonic() - started)

    def _write(self, scope: Scope, request_id: str, status: int, sent_bytes: int, seconds: float) -> None:
        client = scope.get("client")
        line = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "request_id": request_id,
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "bytes": sent_bytes,
            "seconds": round(seconds, 4),
        }
        self._log.info(json.dumps(line, ensure_ascii=True))


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    return given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
