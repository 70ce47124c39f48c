"""The engine model's life inside Triton's Python stub: requests go to the engine process, outputs to the sender."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from dsv4.engine.protocol import FinishReason, GenerateRequest, RequestOutput
from dsv4.errors import ErrorCode, RequestError
from dsv4.triton.api import BackendUtils, Request
from dsv4.triton.metrics import MetricsPublisher, PublisherThread
from dsv4.triton.request import Control, Generation, OutputOptions, read_request
from dsv4.triton.responses import ResponseBuilder
from dsv4.triton.sender import Exchange, ResponseSenderThread

START_FAILURE_PREFIX = "engine start failed: "
"""Marks the one line of the log in which `dsv4 serve` finds the engine's own reason."""
ENGINE_GIVEN_UP = "failed"
SAMPLE_SECONDS = 1.0
STOP_SECONDS = 20.0
CONTROL_SECONDS = 5.0
READY_SECONDS = 2.0

_logger = logging.getLogger(__name__)
_DEAD_PREFIX = f"[{ErrorCode.ENGINE_DEAD.value}]"
_Result = TypeVar("_Result")


class Engine(Protocol):
    """The verbs of `dsv4.engine.client.EngineClient` that this package uses; all of them run in one event loop."""

    async def start(self) -> None:
        """Start the engine process and wait until it is ready. Raises EngineStartError with the engine's reason."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        """Outputs of one request. A failed request ends with an output that has `error`, or raises RequestError."""

    async def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""

    async def stats(self) -> dict[str, Any]:
        """Counters and gauges."""

    async def health(self) -> dict[str, Any]:
        """Answered without the engine's help; `ready` says whether it takes requests."""

    def take_observations(self) -> list[tuple[str, float]]:
        """(histogram, value) since the last call."""

    async def profile(self, action: str) -> None:
        """`start` or `stop`."""

    async def stop(self) -> None:
        """End the engine process."""


@dataclass(frozen=True)
class _LiveRequest:
    client_id: str
    task: asyncio.Task[None]


class EngineService:
    """Owns the event loop thread with the engine client, the sender thread and the live requests."""

    def __init__(
        self,
        api: BackendUtils,
        make_engine: Callable[[], Engine],
        *,
        end_server: Callable[[], None] | None = None,
        metrics: MetricsPublisher | None = None,
    ) -> None:
        """`make_engine` is called in the event loop. `end_server` is called when the engine has died for good."""
        self._api = api
        self._make_engine = make_engine
        self._end_server = end_server or end_parent_process
        self._metrics = metrics
        self._publisher = None if metrics is None else PublisherThread(metrics)
        self._engine: Engine | None = None
        self._live: dict[str, _LiveRequest] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._draining = False
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="engine-client", daemon=True)
        self._sender = ResponseSenderThread(api, self._cancel_threadsafe)

    def start(self, timeout: float | None = None) -> None:
        """Start the engine and wait for it. Raises EngineStartError with the engine's own reason."""
        self._loop_thread.start()
        self._sender.start()
        if self._publisher is not None:
            self._publisher.start()
        try:
            self._call(self._start_engine(), timeout)
        except BaseException:
            self._stop_threads()
            raise

    def execute(self, requests: Iterable[Request]) -> None:
        """Take over a batch of Triton requests. Every one is answered by the sender; nothing is raised."""
        for request in requests:
            try:
                self._accept(request)
            except Exception:
                # The sender of this request could not even be had, so there is no way to answer it.
                _logger.exception("a request could not be taken over")

    def is_ready(self) -> bool:
        """Whether the engine takes requests, for Triton's readiness of the model (asked for from 26.03 on)."""
        try:
            return bool(self._call(self._health(), READY_SECONDS)["ready"])
        except (FutureTimeoutError, RequestError):
            return False

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Refuse new requests, end the live ones, stop the engine. Returns after about `timeout` seconds at most."""
        self._draining = True
        if not self._loop_thread.is_alive():
            return
        try:
            self._call(self._stop_engine(), timeout)
        except FutureTimeoutError:
            _logger.error("the engine did not stop within %.0f s", timeout)
        except Exception:
            _logger.exception("the engine could not be stopped")
        self._stop_threads()

    def _stop_threads(self) -> None:
        if self._publisher is not None:
            self._publisher.stop(timeout=1.0)
        if not self._sender.stop(timeout=5.0):
            _logger.error("the sender is still busy with %d requests", self._sender.live_count)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join(timeout=5.0)

    def _call(self, coroutine: Coroutine[Any, Any, _Result], timeout: float | None) -> _Result:
        future: Future[_Result] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
        except FutureTimeoutError:
            future.cancel()
            raise

    def _accept(self, request: Request) -> None:
        engine_request_id = f"{request.request_id() or 'request'}#{next(self._numbers)}"
        target = request.get_response_sender()
        try:
            parsed: Generation | Control | RequestError = read_request(request, engine_request_id=engine_request_id)
        except RequestError as error:
            parsed = error
        except Exception:
            _logger.exception("request %s could not be read", engine_request_id)
            parsed = RequestError(ErrorCode.INTERNAL, "the request could not be read; the server's log has the reason")
        options = parsed.options if isinstance(parsed, Generation) else OutputOptions()
        exchange = self._sender.open(engine_request_id, target, ResponseBuilder(self._api, options))
        if isinstance(parsed, RequestError):
            self._count(parsed.code)
            self._sender.end(exchange, parsed)
        elif self._draining and isinstance(parsed, Generation):
            self._sender.end(exchange, RequestError(ErrorCode.DRAINING, "the server is shutting down"))
        else:
            self._loop.call_soon_threadsafe(self._begin, parsed, exchange)

    # From here on everything runs in the event loop, except `_cancel_threadsafe` and `_count`.

    def _begin(self, parsed: Generation | Control, exchange: Exchange) -> None:
        if isinstance(parsed, Control):
            task = self._loop.create_task(self._answer_control(parsed, exchange))
            self._background.add(task)
            task.add_done_callback(self._background.discard)
            return
        task = self._loop.create_task(self._generate(parsed, exchange))
        self._live[exchange.request_id] = _LiveRequest(parsed.client_id, task)
        task.add_done_callback(lambda _: self._finish(exchange))

    def _finish(self, exchange: Exchange) -> None:
        """Runs after every generation, even one that was cancelled before its first step."""
        self._live.pop(exchange.request_id, None)
        self._sender.end(exchange, RequestError(ErrorCode.ABORTED, "the request was cancelled"))

    async def _generate(self, generation: Generation, exchange: Exchange) -> None:
        """Hand the engine's outputs to the sender; whatever happens, the exchange has ended afterwards."""
        request_id = exchange.request_id
        try:
            await self._forward(generation.request, exchange)
            error = RequestError(ErrorCode.INTERNAL, "the engine ended the request without a result")
        except asyncio.CancelledError:
            error = RequestError(ErrorCode.ABORTED, "the request was cancelled")
            await self._abort(request_id)
        except RequestError as raised:
            error = raised
            await self._abort(request_id)
        except Exception:
            _logger.exception("request %s failed", request_id)
            error = RequestError(ErrorCode.INTERNAL, "the request failed; the server's log has the reason")
            await self._abort(request_id)
        self._sender.end(exchange, error)

    async def _forward(self, request: GenerateRequest, exchange: Exchange) -> None:
        outputs = self._require_engine().generate(request)
        try:
            async for output in outputs:
                self._sender.put(exchange, output)
                if output.finished:
                    if output.error is not None and output.error.startswith(_DEAD_PREFIX):
                        self._count(ErrorCode.ENGINE_DEAD)
                    return
        finally:
            close = getattr(outputs, "aclose", None)
            if close is not None:
                await close()

    async def _abort(self, request_id: str) -> None:
        try:
            await self._require_engine().abort(request_id)
        except Exception as error:  # noqa: BLE001 - a dead engine has nothing left to abort
            _logger.debug("request %s could not be aborted: %s", request_id, error)

    async def _answer_control(self, control: Control, exchange: Exchange) -> None:
        try:
            answer = await asyncio.wait_for(self._control(control), CONTROL_SECONDS)
        except RequestError as error:
            self._sender.end(exchange, error)
        except asyncio.TimeoutError:
            message = f"the engine did not answer '{control.command}' within {CONTROL_SECONDS:g} s"
            self._sender.end(exchange, RequestError(ErrorCode.DEADLINE, message))
        except Exception:
            _logger.exception("control request '%s' failed", control.command)
            message = f"'{control.command}' failed; the server's log has the reason"
            self._sender.end(exchange, RequestError(ErrorCode.INTERNAL, message))
        else:
            text = json.dumps(answer, ensure_ascii=False)
            self._sender.put(
                exchange,
                RequestOutput(request_id=exchange.request_id, text=text, finish_reason=FinishReason.STOP),
            )

    async def _control(self, control: Control) -> dict[str, Any]:
        engine = self._require_engine()
        if control.command == "abort":
            return {"aborted": self._cancel_by_client_id(control.abort_request_id or "")}
        if control.command == "stats":
            return await engine.stats()
        if control.command == "health":
            return await self._health()
        await engine.profile(control.command.removesuffix("_profile"))
        return {"profiling": control.command == "start_profile"}

    async def _health(self) -> dict[str, Any]:
        health = await self._require_engine().health()
        ready = bool(health.get("ready")) and not self._draining
        return {**health, "ready": ready, "draining": self._draining}

    def _cancel_by_client_id(self, client_id: str) -> int:
        """Cancel all live requests to which a client gave this id; their number."""
        tasks = [live.task for live in self._live.values() if live.client_id == client_id]
        for task in tasks:
            task.cancel()
        return len(tasks)

    def _cancel_threadsafe(self, request_id: str) -> None:
        self._loop.call_soon_threadsafe(self._cancel, request_id)

    def _cancel(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is not None:
            live.task.cancel()

    def _require_engine(self) -> Engine:
        if self._engine is None:
            raise RequestError(ErrorCode.ENGINE_DEAD, "the engine is not running")
        return self._engine

    def _count(self, code: ErrorCode) -> None:
        """Count the end of a request that the engine does not know of."""
        if self._metrics is not None:
            self._metrics.count_outcome(code.value.lower())

    async def _start_engine(self) -> None:
        engine = self._make_engine()
        await engine.start()
        self._engine = engine
        watch = self._loop.create_task(self._watch_engine())
        self._background.add(watch)
        watch.add_done_callback(self._background.discard)

    async def _watch_engine(self) -> None:
        """Publish metrics once a second, and end the server when the engine will not come back."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            health = await self._require_engine().health()
            try:
                await self._publish(health)
            except Exception:
                _logger.exception("the engine could not be sampled")
            if health.get("state") == ENGINE_GIVEN_UP:
                _logger.critical("the engine cannot be kept running (%s); ending the server", health.get("reason"))
                self._end_server()
                return

    async def _publish(self, health: dict[str, Any]) -> None:
        if self._publisher is None or self._publisher.busy:
            return
        engine = self._require_engine()
        try:
            stats = await engine.stats()
        except RequestError:
            stats = None
        self._publisher.put((health, stats, engine.take_observations()))

    async def _stop_engine(self) -> None:
        for live in list(self._live.values()):
            live.task.cancel()
        tasks = [live.task for live in self._live.values()] + list(self._background)
        for task in self._background:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_SECONDS / 4)
        if self._engine is not None:
            await self._engine.stop()


def end_parent_process() -> None:
    """Ask tritonserver, the parent of the Python stub, to end, so that whoever supervises it can start it again."""
    os.kill(os.getppid(), signal.SIGTERM)
