"""Starts, supervises and talks to an engine process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from dsv4.config import EngineConfig
from dsv4.engine.child import KILL_SECONDS, EngineChild
from dsv4.engine.messages import (
    Abort,
    FromEngine,
    Heartbeat,
    Outputs,
    Profile,
    Progress,
    QueryStats,
    Ready,
    Reply,
    StartFailed,
    Stop,
    Submit,
)
from dsv4.engine.output_queue import OutputQueue
from dsv4.engine.protocol import GenerateRequest, RequestOutput
from dsv4.errors import EngineStartError, ErrorCode, RequestError

_logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.25
DEATH_WINDOW_SECONDS = 600.0
MAX_BACKOFF_SECONDS = 30.0
MAX_OBSERVATIONS = 100_000
STATS_SECONDS = 5.0
PROFILE_SECONDS = 60.0


class EngineClient:
    """One engine, restarted when it dies.

    States: `starting`, `ready`, `restarting`, `stopped`, and `failed` once it has died more often than
    `config.max_restarts` within ten minutes. All methods run in the event loop that called `start`.
    """

    def __init__(self, config: EngineConfig, *, on_progress: Callable[[str], None] | None = None) -> None:
        self._config = config
        self._on_progress = on_progress or _logger.info
        self._state = "starting"
        self._reason: str | None = None
        self._verdict: str | None = None
        self._child: EngineChild | None = None
        self._ready: asyncio.Future[None] | None = None
        self._queues: dict[str, OutputQueue] = {}
        self._queries: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._query_ids = itertools.count(1)
        self._deaths: deque[float] = deque()
        self._observations: deque[tuple[str, float]] = deque(maxlen=MAX_OBSERVATIONS)
        self._heartbeat = Heartbeat(0.0, 0.0, 0, 0, [])
        self._heartbeat_at = 0.0
        self._restarts = 0
        self._facts: dict[str, Any] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._restarter: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Launch the engine and wait until it is ready. Raises EngineStartError with the engine's own reason."""
        try:
            await self._launch()
        except BaseException:
            if self._child is not None:
                await self._child.wait(0.0)
            raise
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        """Outputs of one request, the last one `finished`. A failed request ends with an output that has `error`.

        Leaving the iteration early aborts the request.
        """
        if self._state != "ready" or self._child is None:
            yield RequestOutput(request_id=request.request_id, error=str(self._dead_error()))
            return
        if request.request_id in self._queues:
            error = RequestError(ErrorCode.INVALID_ARGUMENT, f"request_id: {request.request_id!r} is already running")
            yield RequestOutput(request_id=request.request_id, error=str(error))
            return
        outputs = OutputQueue()
        self._queues[request.request_id] = outputs
        finished = False
        try:
            await self._child.send(Submit(request))
            while not finished:
                output = await outputs.get()
                finished = output.finished
                yield output
        finally:
            self._queues.pop(request.request_id, None)
            if not finished:
                await self.abort(request.request_id)

    async def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        if self._child is not None and self._state == "ready":
            await self._child.send(Abort(request_id))

    async def stats(self) -> dict[str, Any]:
        """Counters and gauges of the engine (`dsv4.engine.core.EngineCore.stats`) and of its supervision.

        Raises RequestError ENGINE_DEAD when there is no engine, or DEADLINE when it does not answer.
        """
        query = next(self._query_ids)
        stats = await self._ask(query, QueryStats(query), STATS_SECONDS)
        pid = None if self._child is None else self._child.pid
        return {**stats, "restarts": self._restarts, "pid": pid}

    async def health(self) -> dict[str, Any]:
        """State without a round trip."""
        return {
            "ready": self._state == "ready",
            "state": self._state,
            "reason": self._reason,
            "pid": None if self._child is None else self._child.pid,
            "restarts": self._restarts,
            "running": self._heartbeat.running,
            "waiting": self._heartbeat.waiting,
            "last_step_age_seconds": round(self._heartbeat.step_age, 3),
            **self._facts,
        }

    async def profile(self, action: str) -> None:
        """`start` or `stop` a trace. Raises RequestError UNSUPPORTED unless the engine has a `--profile-output`."""
        query = next(self._query_ids)
        await self._ask(query, Profile(query, action), PROFILE_SECONDS)

    async def _ask(self, query: int, message: QueryStats | Profile, seconds: float) -> dict[str, Any]:
        if self._state != "ready" or self._child is None:
            raise self._dead_error()
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._queries[query] = answer
        try:
            await self._child.send(message)
            return await asyncio.wait_for(answer, seconds)
        except asyncio.TimeoutError:
            raise RequestError(ErrorCode.DEADLINE, f"the engine did not answer within {seconds:g} s") from None
        finally:
            self._queries.pop(query, None)

    def take_observations(self) -> list[tuple[str, float]]:
        """(histogram, value) since the last call."""
        return [self._observations.popleft() for _ in range(len(self._observations))]

    async def stop(self, drain_seconds: float | None = None) -> None:
        """End the engine after its running requests, or after `drain_seconds` (default: `--drain-seconds`)."""
        seconds = self._config.drain_seconds if drain_seconds is None else drain_seconds
        self._state = "stopped"
        for task in (self._watcher, self._restarter):
            if task is not None:
                task.cancel()
        if self._child is not None:
            with contextlib.suppress(Exception):
                await self._child.send(Stop(seconds))
            await self._child.wait(seconds + 5.0)
        self._fail_open(RequestError(ErrorCode.DRAINING, "the server is shutting down"))

    async def _launch(self) -> None:
        if self._child is not None:
            # Until a process that failed to start is gone it holds its devices, and its exit would count as that of the
            # next one.
            await self._child.wait(KILL_SECONDS)
        self._ready = asyncio.get_running_loop().create_future()
        self._heartbeat_at = time.monotonic()
        child = EngineChild(self._receive, self._exited)
        self._child = child
        await child.launch(self._config)
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), self._config.start_timeout_seconds)
        except asyncio.TimeoutError:
            child.kill()
            raise EngineStartError(
                f"the engine was not ready within {self._config.start_timeout_seconds:g} s"
            ) from None
        except asyncio.CancelledError:
            child.kill()
            raise

    def _receive(self, message: FromEngine) -> None:
        self._heartbeat_at = time.monotonic()
        if isinstance(message, Outputs):
            for output in message.outputs:
                self._deliver(output)
        elif isinstance(message, Heartbeat):
            self._heartbeat = message
            self._observations.extend(message.observations)
        elif isinstance(message, Reply):
            answer = self._queries.get(message.query_id)
            if answer is not None and not answer.done():
                if message.error is None:
                    answer.set_result(message.value)
                else:
                    answer.set_exception(RequestError.parse(message.error))
        elif isinstance(message, Progress):
            self._on_progress(message.text)
        elif isinstance(message, Ready):
            self._become_ready(message)
        elif isinstance(message, StartFailed):
            self._fail_start(message.message)

    def _deliver(self, output: RequestOutput) -> None:
        outputs = self._queues.get(output.request_id)
        if outputs is not None:
            outputs.put(output)

    def _become_ready(self, message: Ready) -> None:
        self._facts = message.facts
        if self._state != "stopped":
            self._state, self._reason = "ready", None
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def _fail_start(self, reason: str) -> None:
        self._reason = reason
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineStartError(reason))

    def _exited(self, code: int) -> None:
        child = self._child
        last_words = child.last_stderr[-1] if child is not None and child.last_stderr else ""
        reason = f"the engine process ended with {_describe_exit(code)}" + (f": {last_words}" if last_words else "")
        reason, self._verdict = self._verdict or reason, None
        if self._ready is not None and not self._ready.done():
            self._fail_start(reason)
            return
        if self._state != "ready":
            return
        self._reason = reason
        self._state = "restarting"
        _logger.error("%s", reason)
        self._fail_open(self._dead_error())
        self._restarter = asyncio.get_running_loop().create_task(self._restart())

    async def _restart(self) -> None:
        while True:
            now = time.monotonic()
            self._deaths.append(now)
            while self._deaths and now - self._deaths[0] > DEATH_WINDOW_SECONDS:
                self._deaths.popleft()
            if len(self._deaths) > self._config.max_restarts:
                self._state = "failed"
                _logger.critical("the engine died %d times within %.0f s", len(self._deaths), DEATH_WINDOW_SECONDS)
                return
            # The first restart is immediate: a single crash should cost as little as possible.
            delay = 0.0 if len(self._deaths) == 1 else min(2.0 ** (len(self._deaths) - 2), MAX_BACKOFF_SECONDS)
            await asyncio.sleep(delay)
            self._restarts += 1
            try:
                await self._launch()
            except EngineStartError as error:
                self._reason = str(error)
                _logger.error("restart failed: %s", error)
            else:
                return

    async def _watch(self) -> None:
        """Kill an engine that is silent or whose step does not end; its exit then does the rest."""
        woke = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            slept, woke = time.monotonic() - woke, time.monotonic()
            if slept > 4 * WATCH_SECONDS:
                # This process was held up itself: heartbeats may lie in the socket unread.
                self._heartbeat_at = max(self._heartbeat_at, woke - WATCH_SECONDS)
            fault = self._fault(woke) if self._state == "ready" else None
            if fault is not None and self._child is not None:
                _logger.error("%s; killing it", fault)
                self._verdict = fault
                self._heartbeat = Heartbeat(0.0, 0.0, 0, 0, [])
                self._child.kill()

    def _fault(self, now: float) -> str | None:
        """What is wrong with a running engine."""
        config = self._config
        if now - self._heartbeat_at > config.stall_timeout_seconds:
            return f"the engine gave no sign of life for {now - self._heartbeat_at:.1f} s"
        # A step of the CPU engine that waits instead of computing will not end; a device may be what it waits for.
        if config.backend in (None, "cpu") and self._heartbeat.idle_age > config.stall_timeout_seconds:
            return f"the engine hangs: its step has not used the CPU for {self._heartbeat.idle_age:.1f} s"
        if self._heartbeat.step_age > config.hang_timeout_seconds:
            return f"the engine hangs: its step takes longer than {config.hang_timeout_seconds:g} s"
        return None

    def _fail_open(self, error: RequestError) -> None:
        for request_id, outputs in list(self._queues.items()):
            outputs.put(RequestOutput(request_id=request_id, error=str(error)))
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(error)

    def _dead_error(self) -> RequestError:
        if self._state == "stopped":
            return RequestError(ErrorCode.DRAINING, "the server is shutting down")
        again = "it will not be started again" if self._state == "failed" else "it is being started again"
        return RequestError(
            ErrorCode.ENGINE_DEAD, f"the engine is not running ({self._reason or self._state}); {again}"
        )


def _describe_exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
