"""Counts and times HTTP requests."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsv4_clients.proxy.metrics import ProxyMetrics

DISCONNECTED_STATUS = 499


class MeasurementMiddleware:
    """Labels a request with its path if the application has it, so that the number of label values stays small."""

    def __init__(self, app: ASGIApp, *, metrics: ProxyMetrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoint = scope["path"] if scope["path"] in self._paths else "other"
        status = DISCONNECTED_STATUS
        started = time.monotonic()

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.running.labels(endpoint).inc()
        try:
            await self._app(scope, receive, send_and_note)
        finally:
            self._metrics.running.labels(endpoint).dec()
            if scope.get("state", {}).get("client_disconnected"):
                status = DISCONNECTED_STATUS
            if status == DISCONNECTED_STATUS:
                self._metrics.disconnects.labels(endpoint).inc()
            self._metrics.requests.labels(endpoint, str(status)).inc()
            self._metrics.request_seconds.labels(endpoint).observe(time.monotonic() - started)
