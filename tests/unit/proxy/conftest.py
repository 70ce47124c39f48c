from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from dsv4_clients.proxy.app import build_app
from dsv4_clients.proxy.settings import ProxySettings

from tests.unit.proxy.triton_double import TritonDouble

StartProxy = Callable[..., Awaitable[httpx.AsyncClient]]


@asynccontextmanager
async def running_proxy(settings: ProxySettings) -> AsyncIterator[str]:
    """The proxy under uvicorn on a free port; gives its base URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            build_app(settings),
            http="httptools",
            access_log=False,
            log_config=None,
            lifespan="on",
            timeout_graceful_shutdown=1,
        )
    )
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@pytest.fixture
async def triton() -> AsyncIterator[TritonDouble]:
    double = TritonDouble()
    await double.start()
    yield double
    await double.stop()


@pytest.fixture
async def start_proxy(triton: TritonDouble) -> AsyncIterator[StartProxy]:
    """Starts a proxy with the given settings in front of `triton` and gives a client of it."""
    async with AsyncExitStack() as stack:

        async def start(**settings: Any) -> httpx.AsyncClient:
            settings = {"triton_metrics": None, "triton_channels": 1, "access_log": False, **settings}
            url = await stack.enter_async_context(
                running_proxy(ProxySettings(triton=f"127.0.0.1:{triton.port}", **settings))
            )
            return await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=10, trust_env=False))

        yield start


@pytest.fixture
async def client(start_proxy: StartProxy) -> httpx.AsyncClient:
    return await start_proxy()


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until `condition` holds; fails after `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)
