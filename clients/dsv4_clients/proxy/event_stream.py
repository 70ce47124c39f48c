"""Server-Sent Events with back-pressure, keep-alive comments and immediate cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsv4_clients.proxy.disconnect import ClientDisconnected, wait_for_disconnect
from dsv4_clients.proxy.errors import ApiError, as_api_error
from dsv4_clients.proxy.tasks import cancel_and_wait

MAX_UNSENT_EVENTS = 64
KEEP_ALIVE_COMMENT = b": keep-alive\n\n"
EVENT_STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # reverse proxies of nginx's kind must not collect the events
}

_log = logging.getLogger(__name__)


class EventBuffer:
    """Runs an event generator in a task of its own and holds at most MAX_UNSENT_EVENTS events.

    The generator is paused while the buffer is full, so a slow reader slows the source and costs no memory. Events
    that arrived while a write was under way leave in one write.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events
        self._waiting: list[bytes] = []
        self._reader: asyncio.Future[bool] | None = None
        self._drained = asyncio.Event()
        self.error: Exception | None = None
        self.ended = False
        self._task = asyncio.ensure_future(self._run())

    @property
    def is_empty(self) -> bool:
        """True when no event waits."""
        return not self._waiting

    async def _run(self) -> None:
        try:
            async for event in self._events:
                self._waiting.append(event)
                self._wake(True)
                if len(self._waiting) >= MAX_UNSENT_EVENTS:
                    self._drained.clear()
                    await self._drained.wait()
        except Exception as error:  # noqa: BLE001 - handed to the writer, which turns it into a response
            self.error = error
        finally:
            self.ended = True
            self._wake(True)

    def _wake(self, has_something: bool) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(has_something)

    async def wait(self, timeout_seconds: float) -> bool:
        """True when there is something to take or the generator has ended; False after the timeout."""
        if self._waiting or self.ended:
            return True
        loop = asyncio.get_running_loop()
        self._reader = loop.create_future()
        timer = loop.call_later(timeout_seconds, self._wake, False)
        try:
            return await self._reader
        finally:
            timer.cancel()
            self._reader = None

    def take(self) -> bytes:
        """All waiting events as one block; empty only when the generator has ended."""
        block = b"".join(self._waiting)
        self._waiting.clear()
        self._drained.set()
        return block

    async def close(self) -> None:
        """Stop the generator and run its clean-up."""
        await cancel_and_wait(self._task)
        with contextlib.suppress(RuntimeError):
            await self._events.aclose()


class EventStream(Response):
    """A `text/event-stream` response that ends its generator the moment the client hangs up."""

    media_type = "text/event-stream"

    def __init__(
        self,
        buffer: EventBuffer,
        *,
        keep_alive_seconds: float,
        format_error: Callable[[ApiError], bytes],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**EVENT_STREAM_HEADERS, **(headers or {})})
        self._buffer = buffer
        self._keep_alive_seconds = keep_alive_seconds
        self._format_error = format_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        watching = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({writing, watching}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
            else:
                scope.setdefault("state", {})["client_disconnected"] = True
        finally:
            await cancel_and_wait(writing, watching)
            await self._buffer.close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        buffer = self._buffer
        while True:
            if not await buffer.wait(self._keep_alive_seconds):
                await send({"type": "http.response.body", "body": KEEP_ALIVE_COMMENT, "more_body": True})
                continue
            ended = buffer.ended
            block = buffer.take()
            if block:
                await send({"type": "http.response.body", "body": block, "more_body": True})
            if ended:
                break
        last = b"" if buffer.error is None else self._format_error(_logged(buffer.error))
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def open_event_stream(
    request: Request,
    events: AsyncGenerator[bytes, None],
    *,
    keep_alive_seconds: float,
    format_error: Callable[[ApiError], bytes],
    headers: Mapping[str, str] | None = None,
) -> EventStream:
    """Start `events` and wait for the first one, so that an early error is still an HTTP status.

    After `keep_alive_seconds` without an event the response starts all the same, with a comment, and later errors
    become error events. Raises what `events` raised first, or ClientDisconnected.
    """
    buffer = EventBuffer(events)
    watching = asyncio.ensure_future(wait_for_disconnect(request.receive))
    waiting = asyncio.ensure_future(buffer.wait(keep_alive_seconds))
    opened = False
    try:
        await asyncio.wait({waiting, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise ClientDisconnected
        if buffer.error is not None and buffer.is_empty:
            raise buffer.error
        opened = True
    finally:
        await cancel_and_wait(waiting, watching)
        if not opened:
            await buffer.close()
    return EventStream(buffer, keep_alive_seconds=keep_alive_seconds, format_error=format_error, headers=headers)


def _logged(error: Exception) -> ApiError:
    api_error = as_api_error(error)
    if api_error.status == 500:
        _log.error("stream failed", exc_info=error)
    return api_error
