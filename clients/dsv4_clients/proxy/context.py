"""What every route needs: settings, the client of Triton, metrics."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

import httpx
from dsv4.chat.tokenizer import ChatTokenizer
from starlette.requests import Request

from dsv4_clients.proxy.errors import ApiError
from dsv4_clients.proxy.metrics import ProxyMetrics
from dsv4_clients.proxy.monitor import EngineMonitor
from dsv4_clients.proxy.settings import ProxySettings
from dsv4_clients.proxy.triton_client import TritonClient

TRACE_HEADERS = ("traceparent", "tracestate")


@dataclass(kw_only=True)
class ProxyContext:
    """Made once, when the application starts."""

    settings: ProxySettings
    client: TritonClient
    monitor: EngineMonitor
    metrics: ProxyMetrics
    http: httpx.AsyncClient
    tokenizer: ChatTokenizer | None = None
    started_at: int = field(default_factory=lambda: int(time.time()))

    def resolve_model(self, name: str | None) -> str:
        """The served name to answer with. Raises a 404 for a name that is not served."""
        names = self.settings.served_model_names
        if name is None:
            return names[0]
        if name not in names:
            message = f"model: {name!r} is not served here; use {', '.join(map(repr, names))}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return name


def context_of(request: Request) -> ProxyContext:
    """The context of the application that answers `request`."""
    context: ProxyContext = request.app.state.context
    return context


def trace_metadata(request: Request) -> tuple[tuple[str, str], ...]:
    """W3C trace context of the HTTP request, to be passed on as gRPC metadata."""
    return tuple((name, request.headers[name]) for name in TRACE_HEADERS if name in request.headers)


def new_id(prefix: str) -> str:
    """A unique id in OpenAI's style; ids that clients send are labels only, because they may repeat."""
    return f"{prefix}-{uuid.uuid4().hex}"
