"""Noticing that the HTTP client has gone, while something else is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from dsv4_clients.proxy.tasks import cancel_and_wait

T = TypeVar("T")


class ClientDisconnected(Exception):  # noqa: N818 - an event, not a failure
    """The client closed the connection before the answer was complete."""


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the connection is closed. The request body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`; cancels it and raises ClientDisconnected as soon as the client hangs up."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected
    finally:
        await cancel_and_wait(working, watching)
