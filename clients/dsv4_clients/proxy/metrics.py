"""Prometheus metrics of the proxy, served together with Triton's and the engine's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

import httpx
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from dsv4_clients.proxy.triton_client import EngineOutput

TRITON_TIMEOUT_SECONDS = 2.0

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0),
)
"""Up to ten minutes: long prefills and reasoning answers must not all fall into the last bucket."""


class ProxyMetrics:
    """All metric families of the proxy, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("http_requests", "HTTP requests answered.", "endpoint", "status")
        self.request_seconds = self._histogram(
            "http_request_seconds", "From the request to the last byte of its answer.", "endpoint"
        )
        self.running = Gauge(
            "dsv4_proxy_http_requests_running", "HTTP requests being answered.", ["endpoint"], registry=self.registry
        )
        self.disconnects = self._counter("client_disconnects", "Requests whose client hung up early.", "endpoint")
        self.first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "From a generation's start to its first engine response."
        )
        self.output_interval_seconds = self._histogram(
            "output_interval_seconds", "Between two engine responses of a generation; one has the tokens of one step."
        )
        self.generation_seconds = self._histogram("generation_seconds", "From a generation's start to its end.")
        self.generations = self._counter("generations", "Generations by outcome.", "outcome")
        self.tokens = self._counter("tokens", "Tokens of finished generations by kind.", "kind")
        self._open_streams = Gauge("dsv4_proxy_open_streams", "Open streams to Triton.", registry=self.registry)
        self._engine_ready = Gauge(
            "dsv4_proxy_engine_ready", "1 when the engine's last health report said ready.", registry=self.registry
        )
        self._triton_up = Gauge(
            "dsv4_proxy_triton_metrics_up", "1 when Triton's metrics could be read.", registry=self.registry
        )
        ProcessCollector(namespace="dsv4_proxy", registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"dsv4_proxy_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"dsv4_proxy_{name}", text, labels, registry=self.registry, buckets=_SECONDS)

    def watch(self, *, open_streams: Callable[[], float], engine_ready: Callable[[], float]) -> None:
        """Read these gauges when they are scraped."""
        self._open_streams.set_function(open_streams)
        self._engine_ready.set_function(engine_ready)

    async def observe(self, outputs: AsyncGenerator[EngineOutput, None]) -> AsyncGenerator[EngineOutput, None]:
        """The same outputs, measured."""
        started = last = time.monotonic()
        is_first = True
        outcome = "error"
        try:
            async for output in outputs:
                now = time.monotonic()
                histogram = self.first_token_seconds if is_first else self.output_interval_seconds
                histogram.observe(now - last)
                is_first = False
                last = now
                if output.finish_reason is not None:
                    outcome = output.finish_reason
                if output.usage is not None:
                    self._count_tokens(output.usage)
                yield output
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "cancelled" if outcome == "error" else outcome
            raise
        finally:
            await outputs.aclose()
            self.generations.labels(outcome).inc()
            self.generation_seconds.observe(time.monotonic() - started)

    def _count_tokens(self, usage: dict[str, int]) -> None:
        for kind in ("prompt", "completion", "cached", "reasoning", "draft", "accepted_draft"):
            self.tokens.labels(kind).inc(usage.get(f"{kind}_tokens") or 0)

    async def text(self, triton_url: str | None, http: httpx.AsyncClient) -> bytes:
        """The exposition text: the proxy's families, then those of Triton at `triton_url`."""
        triton = b""
        if triton_url is not None:
            try:
                response = await http.get(triton_url, timeout=TRITON_TIMEOUT_SECONDS)
                response.raise_for_status()
                triton = response.content
            except httpx.HTTPError:
                triton = b""
        self._triton_up.set(1 if triton else 0)
        return generate_latest(self.registry) + triton
