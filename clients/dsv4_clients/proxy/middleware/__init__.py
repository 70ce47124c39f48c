"""Pure ASGI middleware: no buffering of responses, no task of its own between server and route."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from dsv4_clients.proxy.metrics import ProxyMetrics
from dsv4_clients.proxy.middleware.authentication import AuthenticationMiddleware
from dsv4_clients.proxy.middleware.body_limit import BodyLimitMiddleware
from dsv4_clients.proxy.middleware.concurrency import ConcurrencyMiddleware
from dsv4_clients.proxy.middleware.measurement import MeasurementMiddleware
from dsv4_clients.proxy.middleware.request_log import RequestLogMiddleware
from dsv4_clients.proxy.settings import ProxySettings

__all__ = ["add_middleware"]


def add_middleware(app: FastAPI, settings: ProxySettings, metrics: ProxyMetrics, paths: frozenset[str]) -> None:
    """Install all layers; `paths` are those that metrics name. The last layer added is the outermost."""
    app.add_middleware(
        ConcurrencyMiddleware,
        limit=settings.max_concurrent_requests,
        limit_per_key=settings.max_concurrent_requests_per_key,
    )
    app.add_middleware(
        BodyLimitMiddleware, max_bytes=settings.max_body_bytes, timeout_seconds=settings.body_timeout_seconds
    )
    app.add_middleware(AuthenticationMiddleware, api_keys=settings.api_keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    if settings.trusted_hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(settings.trusted_hosts), www_redirect=False)
    app.add_middleware(MeasurementMiddleware, metrics=metrics, paths=paths)
    app.add_middleware(RequestLogMiddleware, enabled=settings.access_log)
