"""The ASGI application."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from dsv4 import __version__
from dsv4.chat.tokenizer import ChatTokenizer
from dsv4.errors import RequestError
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from dsv4_clients.proxy.context import ProxyContext
from dsv4_clients.proxy.disconnect import ClientDisconnected
from dsv4_clients.proxy.errors import ApiError, as_api_error
from dsv4_clients.proxy.http_json import error_response
from dsv4_clients.proxy.metrics import ProxyMetrics
from dsv4_clients.proxy.middleware import add_middleware
from dsv4_clients.proxy.monitor import EngineMonitor
from dsv4_clients.proxy.openapi import install_openapi
from dsv4_clients.proxy.routes import chat, completions, messages, playground, responses, service, tokenize
from dsv4_clients.proxy.settings import ProxySettings
from dsv4_clients.proxy.triton_client import TritonClient
from dsv4_clients.proxy.validation import validation_error

ROUTE_MODULES = (chat, completions, responses, messages, tokenize, service)
DESCRIPTION = "OpenAI-compatible API of DeepSeek V4 Flash on Triton Inference Server."

_log = logging.getLogger(__name__)


def build_app(settings: ProxySettings) -> FastAPI:
    """The application; it connects to tritonserver when it starts, and does not need it to be up.

    Raises ConfigurationError when the tokenizer cannot be loaded.
    """

    metrics = ProxyMetrics()
    tokenizer = None if settings.tokenizer is None else ChatTokenizer.from_directory(settings.tokenizer)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        client = TritonClient(settings.triton, channels=settings.triton_channels)
        monitor = EngineMonitor(client)
        metrics.watch(open_streams=lambda: client.open_streams, engine_ready=lambda: float(monitor.last_report.ready))
        monitor.start()
        async with httpx.AsyncClient(trust_env=False) as http:
            app.state.context = ProxyContext(
                settings=settings, client=client, monitor=monitor, metrics=metrics, http=http, tokenizer=tokenizer
            )
            yield
        await monitor.stop()
        await client.close()

    app = FastAPI(
        title="dsv4-triton",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        redoc_url=None,
    )
    routers = [module.router for module in ROUTE_MODULES]
    if settings.playground:
        routers.append(playground.router)
    for router in routers:
        app.include_router(router)
    _add_exception_handlers(app)
    install_openapi(app, with_keys=bool(settings.api_keys))
    paths = frozenset(route.path for router in routers for route in router.routes if isinstance(route, Route))
    add_middleware(app, settings, metrics, paths)
    return app


def _add_exception_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    @app.exception_handler(RequestError)
    async def answer_error(request: Request, error: Exception) -> Response:
        return error_response(as_api_error(error), request.url.path)

    @app.exception_handler(RequestValidationError)
    async def answer_validation_error(request: Request, error: RequestValidationError) -> Response:
        return error_response(validation_error(error.errors()), request.url.path)

    @app.exception_handler(HTTPException)
    async def answer_http_error(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        message = f"{error.detail}: {request.method} {request.url.path}"
        return error_response(ApiError(error.status_code, message, code=code, headers=error.headers), request.url.path)

    @app.exception_handler(ClientDisconnected)
    async def answer_nobody(request: Request, error: ClientDisconnected) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def answer_defect(request: Request, error: Exception) -> Response:
        return error_response(as_api_error(error), request.url.path)
