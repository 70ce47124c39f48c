"""The one thread that talks to Triton about requests: it sends, polls for cancellation, and ends each request once."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from dsv4.engine.protocol import RequestOutput
from dsv4.errors import ErrorCode, RequestError
from dsv4.triton.api import BackendUtils, ResponseSender
from dsv4.triton.responses import OutputJoiner, ResponseBuilder

CANCELLATION_POLL_SECONDS = 0.05
MAX_UNSENT_OUTPUTS = 4096
"""Outputs of one streamed request that may wait for Triton; more means that nobody takes them."""
_SLOW_SEND_SECONDS = 5.0

_logger = logging.getLogger(__name__)


class Exchange:
    """One open request: where its outputs wait to be sent. Made by `ResponseSenderThread.open`."""

    def __init__(self, request_id: str, target: ResponseSender, builder: ResponseBuilder) -> None:
        self.request_id = request_id
        self.target = target
        self.builder = builder
        self.lock = threading.Lock()
        self.joiner = OutputJoiner()
        self.ended = False
        self.scheduled = False
        self.cancelled = False


class ResponseSenderThread:
    """Sends the outputs of all requests from one thread, so that producing tokens never waits for Triton.

    Every request gets exactly one response with the FINAL flag: the one whose output is finished. A response sender
    must not be touched after that, hence cancellation is polled by the same thread. Outputs that pile up while Triton
    is slow are joined into one response. `on_cancel` is called once per cancelled request, from this thread.
    """

    def __init__(
        self,
        api: BackendUtils,
        on_cancel: Callable[[str], None],
        *,
        poll_seconds: float = CANCELLATION_POLL_SECONDS,
    ) -> None:
        self._api = api
        self._on_cancel = on_cancel
        self._poll_seconds = poll_seconds
        self._ready: queue.SimpleQueue[Exchange | None] = queue.SimpleQueue()
        self._live: dict[str, Exchange] = {}
        self._live_lock = threading.Lock()
        self._idle = threading.Condition(self._live_lock)
        self._thread = threading.Thread(target=self._run, name="triton-sender", daemon=True)

    @property
    def live_count(self) -> int:
        """Requests without their final response."""
        with self._live_lock:
            return len(self._live)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def open(self, request_id: str, target: ResponseSender, builder: ResponseBuilder) -> Exchange:
        """Take over the response sender of a request; from now on only this object uses it."""
        exchange = Exchange(request_id, target, builder)
        with self._live_lock:
            if request_id in self._live:
                raise ValueError(f"request {request_id} is already open")
            self._live[request_id] = exchange
        return exchange

    def put(self, exchange: Exchange, output: RequestOutput) -> None:
        """Queue an output; the last one has a finish reason or an error. Thread-safe.

        Raises RuntimeError after the last one, and RequestError ABORTED when too many outputs wait unsent.
        """
        with exchange.lock:
            if exchange.ended:
                raise RuntimeError(f"request {exchange.request_id} has already ended")
            streaming = exchange.builder.options.stream
            if streaming and not output.finished and exchange.joiner.count >= MAX_UNSENT_OUTPUTS:
                raise RequestError(ErrorCode.ABORTED, f"{MAX_UNSENT_OUTPUTS} outputs wait unread")
            exchange.joiner.add(output)
            exchange.ended = output.finished
            wake = (streaming or exchange.ended) and not exchange.scheduled
            exchange.scheduled = exchange.scheduled or wake
        if wake:
            self._ready.put(exchange)

    def end(self, exchange: Exchange, error: RequestError) -> None:
        """End a request with an error unless it has ended already. Thread-safe."""
        with exchange.lock:
            if exchange.ended:
                return
        # Only the owner of an exchange puts, so nothing can end it in between.
        self.put(exchange, RequestOutput(request_id=exchange.request_id, error=str(error)))

    def wait_idle(self, timeout: float) -> bool:
        """Wait until every request has its final response; False if some have not after `timeout` seconds."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._live, timeout)

    def stop(self, timeout: float) -> bool:
        """Send what is queued and end the thread; False if it is still busy after `timeout` seconds."""
        self._ready.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        next_poll = time.monotonic() + self._poll_seconds
        while True:
            try:
                exchange = self._ready.get(timeout=max(0.0, next_poll - time.monotonic()))
                if exchange is None:
                    return
                self._send(exchange)
            except queue.Empty:
                pass
            if time.monotonic() >= next_poll:
                self._poll_cancellation()
                next_poll = time.monotonic() + self._poll_seconds

    def _send(self, exchange: Exchange) -> None:
        with exchange.lock:
            exchange.scheduled = False
            output = exchange.joiner.take()
        if output is None:
            return
        started = time.monotonic()
        try:
            self._transmit(exchange, output)
        except Exception as error:  # noqa: BLE001 - pybind raises whatever the server says; the thread must live on
            _logger.error("request %s: Triton took no response: %s", exchange.request_id, error)
            self._give_up(exchange, output)
        elapsed = time.monotonic() - started
        if elapsed > _SLOW_SEND_SECONDS:
            _logger.warning("request %s: Triton took %.1f s for a response", exchange.request_id, elapsed)

    def _transmit(self, exchange: Exchange, output: RequestOutput) -> None:
        response = exchange.builder.build(output)
        if not output.finished:
            exchange.target.send(response)
            return
        self._forget(exchange)
        exchange.target.send(response, flags=self._api.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _give_up(self, exchange: Exchange, output: RequestOutput) -> None:
        """After a failed send: if it was the last response, try to send at least the flag; else stop the request."""
        if not output.finished:
            self._cancel(exchange)
            return
        self._forget(exchange)
        try:
            exchange.target.send(flags=self._api.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception as error:  # noqa: BLE001 - as above
            _logger.error("request %s: Triton took no final flag either: %s", exchange.request_id, error)

    def _forget(self, exchange: Exchange) -> None:
        with self._idle:
            self._live.pop(exchange.request_id, None)
            self._idle.notify_all()

    def _poll_cancellation(self) -> None:
        with self._live_lock:
            exchanges = [exchange for exchange in self._live.values() if not exchange.cancelled]
        for exchange in exchanges:
            try:
                if exchange.target.is_cancelled():
                    self._cancel(exchange)
            except Exception as error:  # noqa: BLE001 - as above
                _logger.error("request %s: cannot ask Triton for cancellation: %s", exchange.request_id, error)

    def _cancel(self, exchange: Exchange) -> None:
        if not exchange.cancelled:
            exchange.cancelled = True
            self._on_cancel(exchange.request_id)
