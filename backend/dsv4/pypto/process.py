"""The PyPTO engine inside the engine process: the same messages as the reference engine's step thread."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from dsv4.config import EngineConfig
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
    ToEngine,
)
from dsv4.engine.protocol import RequestOutput
from dsv4.errors import Dsv4Error, ErrorCode, RequestError
from dsv4.pypto.engine import PyptoEngine
from dsv4.pypto.requirements import check_devices, options_of

_logger = logging.getLogger(__name__)

INBOX_SECONDS = 0.2


class PyptoThread(threading.Thread):
    """Owns upstream's engine and its event loop, which must be one and the same for all calls.

    Messages come in through `inbox`, messages go out through `send`; `ended` is called when nothing more will come.
    When the worker dies or hangs, every request gets ENGINE_DEAD and the thread ends, and with it the process; the
    client starts another.
    """

    def __init__(self, config: EngineConfig, send: Callable[[FromEngine], object], ended: Callable[[], object]) -> None:
        super().__init__(name="engine-pypto", daemon=True)
        self._config = config
        self._send = send
        self._ended = ended
        self.inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._engine: PyptoEngine | None = None
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._draining = False

    def run(self) -> None:
        """Load, then serve until told to stop or until the worker is lost."""
        try:
            asyncio.run(self._serve())
        finally:
            self._ended()

    def heartbeat(self) -> Heartbeat:
        """State as seen from the process's own event loop."""
        engine = self._engine
        if engine is None:
            return Heartbeat(0.0, 0.0, 0, 0, [])
        running, waiting = engine.load()
        # This process waits for the devices most of the time, so idleness says nothing here.
        return Heartbeat(engine.step_age(), 0.0, running, waiting, engine.metrics.take_observations())

    async def _serve(self) -> None:
        try:
            check_devices(self._config)
            engine = PyptoEngine(options_of(self._config, progress=self._report), progress=self._report)
            await engine.start()
        except Dsv4Error as error:
            self._send(StartFailed(str(error)))
            return
        except Exception as error:
            _logger.exception("the PyPTO engine cannot start")
            self._send(StartFailed(f"{type(error).__name__}: {error}"))
            return
        self._engine = engine
        await self._serve_ready(engine)

    async def _serve_ready(self, engine: PyptoEngine) -> None:
        self._send(Ready({"engine": "pypto"}))
        lost = asyncio.create_task(engine.lost.wait())
        stop: asyncio.Task[Any] | None = None
        try:
            while not lost.done() and (stop is None or not stop.done()):
                message = await asyncio.to_thread(self._next_message)
                if isinstance(message, Stop):
                    self._draining = True
                    stop = stop or asyncio.create_task(self._drain(message.drain_seconds))
                elif message is not None:
                    await self._handle(engine, message)
        finally:
            lost.cancel()
            await engine.stop()
            await asyncio.gather(*self._requests.values(), return_exceptions=True)

    def _next_message(self) -> ToEngine | None:
        try:
            return self.inbox.get(timeout=INBOX_SECONDS)
        except queue.Empty:
            return None

    async def _handle(self, engine: PyptoEngine, message: ToEngine) -> None:
        if isinstance(message, Submit):
            request_id = message.request.request_id
            if self._draining:
                error = RequestError(ErrorCode.DRAINING, "the server is shutting down")
                self._send(Outputs([RequestOutput(request_id=request_id, error=str(error))]))
                return
            task = asyncio.create_task(self._generate(engine, message))
            self._requests[request_id] = task
            task.add_done_callback(lambda _: self._requests.pop(request_id, None))
        elif isinstance(message, Abort):
            # The client has left, so nobody waits for a last output.
            task_or_none = self._requests.get(message.request_id)
            if task_or_none is not None:
                task_or_none.cancel()
        elif isinstance(message, QueryStats):
            self._send(Reply(message.query_id, await engine.stats()))
        elif isinstance(message, Profile):
            self._send(await self._profile(engine, message))

    async def _profile(self, engine: PyptoEngine, message: Profile) -> Reply:
        try:
            await engine.profile(message.action)
        except RequestError as error:
            return Reply(message.query_id, {}, str(error))
        return Reply(message.query_id, {"profiling": message.action == "start"})

    def _report(self, text: str) -> None:
        self._send(Progress(text))

    async def _generate(self, engine: PyptoEngine, message: Submit) -> None:
        async for output in engine.generate(message.request):
            self._send(Outputs([output]))

    async def _drain(self, seconds: float) -> None:
        """Give the running requests so long to end."""
        if self._requests:
            await asyncio.wait(list(self._requests.values()), timeout=seconds)
