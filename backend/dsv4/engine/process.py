"""The engine process: one thread steps, the event loop talks.

It reads its configuration from standard input, whose other end the parent keeps open: when that end closes, for
whatever reason, the process ends. Everything else travels over a ZeroMQ socket in a private directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio

from dsv4.config import EngineConfig
from dsv4.engine.faults import Faults
from dsv4.engine.messages import (
    Abort,
    FromEngine,
    Heartbeat,
    Launch,
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
    decode_to_engine,
    encode,
)
from dsv4.engine.protocol import GenerateRequest, RequestOutput
from dsv4.errors import Dsv4Error, ErrorCode, RequestError

if TYPE_CHECKING:
    from dsv4.engine.core import EngineCore
    from dsv4.engine.structured_output import OutputConstraint
    from dsv4.pypto.process import PyptoThread

_logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
IDLE_SECONDS = 0.2

BUSY_CPU_SECONDS = 0.001
"""CPU time of the step thread that shows that a step computes."""

LINGER_MILLISECONDS = 1000
MAX_COMPILING = 64
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class _Compiled:
    """A request whose grammar is compiled."""

    request: GenerateRequest
    constraint: Future[OutputConstraint | None]


class StepThread(threading.Thread):
    """Owns the core. Messages come in through a queue, messages go out through a callback."""

    def __init__(self, config: EngineConfig, send: Callable[[FromEngine], object], ended: Callable[[], object]) -> None:
        super().__init__(name="engine-step", daemon=True)
        self._config = config
        self._send = send
        self._ended = ended
        self.inbox: queue.SimpleQueue[ToEngine | _Compiled] = queue.SimpleQueue()
        self._core: EngineCore | None = None
        self._stop_at: float | None = None
        self._last_step = time.monotonic()
        self._busy = False
        self._cpu_seconds = 0.0
        self._cpu_used_at = 0.0
        self._compiling: set[str] = set()
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def run(self) -> None:
        """Load, then step until told to stop."""
        try:
            self._core = self._load()
            if self._core is not None:
                self._loop(self._core)
        finally:
            self._ended()

    def heartbeat(self) -> Heartbeat:
        """State as seen from the event loop."""
        now, cpu_seconds = time.monotonic(), self._own_cpu_seconds()
        if cpu_seconds - self._cpu_seconds >= BUSY_CPU_SECONDS:
            self._cpu_seconds, self._cpu_used_at = cpu_seconds, now
        age = now - self._last_step if self._busy else 0.0
        idle_age = min(age, now - self._cpu_used_at)
        core = self._core
        if core is None:
            return Heartbeat(age, idle_age, 0, 0, [])
        return Heartbeat(age, idle_age, core.num_running, core.num_waiting, core.metrics.take_observations())

    def _own_cpu_seconds(self) -> float:
        # Of this thread alone: the event loop and the worker threads of PyTorch use the CPU even when a step hangs.
        if self.ident is None or not self.is_alive():
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident))

    def _load(self) -> EngineCore | None:
        from dsv4.engine.loading import load_engine

        def report(text: str) -> None:
            self._send(Progress(text))

        try:
            core = load_engine(self._config, faults=Faults.from_environment(os.environ), progress=report)
        except Dsv4Error as error:
            self._send(StartFailed(str(error)))
            return None
        except Exception as error:
            _logger.exception("the engine cannot start")
            self._send(StartFailed(f"{type(error).__name__}: {error}"))
            return None
        self._send(Ready({"max_model_len": core.max_model_len}))
        return core

    def _loop(self, core: EngineCore) -> None:
        while True:
            self._take_messages(core, wait=not core.has_work)
            if self._stop_at is not None and (not core.has_work or time.monotonic() >= self._stop_at):
                self._publish(core.abort_all(RequestError(ErrorCode.DRAINING, "the server is shutting down")))
                return
            if core.has_work:
                self._busy = True
                self._publish(core.step())
            self._last_step = time.monotonic()
            self._busy = core.has_work

    def _take_messages(self, core: EngineCore, *, wait: bool) -> None:
        try:
            message = self.inbox.get(timeout=IDLE_SECONDS) if wait else self.inbox.get_nowait()
            while True:
                self._handle(core, message)
                message = self.inbox.get_nowait()
        except queue.Empty:
            return

    def _handle(self, core: EngineCore, message: ToEngine | _Compiled) -> None:
        if isinstance(message, Submit):
            self._submit(core, message.request)
        elif isinstance(message, _Compiled):
            self._take_compiled(core, message)
        elif isinstance(message, Abort):
            self._compiling.discard(message.request_id)
            core.abort(message.request_id)
        elif isinstance(message, QueryStats):
            self._send(Reply(message.query_id, core.stats()))
        elif isinstance(message, Profile):
            self._send(self._profile(core, message))
        elif isinstance(message, Stop):
            self._stop_at = time.monotonic() + message.drain_seconds

    def _profile(self, core: EngineCore, message: Profile) -> Reply:
        try:
            core.profile(message.action)
        except RequestError as error:
            return Reply(message.query_id, {}, str(error))
        return Reply(message.query_id, {})

    def _submit(self, core: EngineCore, request: GenerateRequest) -> None:
        if request.sampling_parameters.structured_outputs is None or self._stop_at is not None:
            self._add(core, request, None)
        elif len(self._compiling) >= MAX_COMPILING:
            self._refuse(request, RequestError(ErrorCode.QUEUE_FULL, f"{MAX_COMPILING} grammars are being compiled"))
        elif request.request_id not in self._compiling:
            # Beside the steps, which a large grammar would hold up.
            self._compiling.add(request.request_id)
            future = self._compiler.submit(core.compile_grammar, request)
            future.add_done_callback(lambda done: self.inbox.put(_Compiled(request, done)))

    def _take_compiled(self, core: EngineCore, compiled: _Compiled) -> None:
        request = compiled.request
        if request.request_id not in self._compiling:
            return  # aborted
        self._compiling.remove(request.request_id)
        try:
            constraint = compiled.constraint.result()
        except RequestError as error:
            self._refuse(request, error)
        except Exception:
            _logger.exception("the grammar of request %s failed", request.request_id)
            self._refuse(request, RequestError(ErrorCode.INTERNAL, "structured_outputs: the grammar failed"))
        else:
            self._add(core, request, constraint)

    def _add(self, core: EngineCore, request: GenerateRequest, constraint: OutputConstraint | None) -> None:
        try:
            if self._stop_at is not None:
                raise RequestError(ErrorCode.DRAINING, "the server is shutting down")
            core.add(request, constraint)
        except RequestError as error:
            self._refuse(request, error)

    def _refuse(self, request: GenerateRequest, error: RequestError) -> None:
        self._publish([RequestOutput(request_id=request.request_id, error=str(error))])

    def _publish(self, outputs: list[RequestOutput]) -> None:
        if outputs:
            self._send(Outputs(outputs))


async def serve(launch: Launch) -> None:
    """Connect to the parent and run until the core ends."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(launch.address)
    loop = asyncio.get_running_loop()
    outbox: asyncio.Queue[FromEngine] = asyncio.Queue()
    ended = asyncio.Event()

    config = EngineConfig(**launch.config)
    thread = _engine_thread(config)(
        config,
        send=lambda message: loop.call_soon_threadsafe(outbox.put_nowait, message),
        ended=lambda: loop.call_soon_threadsafe(ended.set),
    )
    loop.add_signal_handler(signal.SIGTERM, lambda: thread.inbox.put(Stop(config.drain_seconds)))
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    thread.start()
    tasks = [
        loop.create_task(_send_all(socket, outbox)),
        loop.create_task(_receive_all(socket, thread)),
        loop.create_task(_beat(outbox, thread)),
    ]
    await ended.wait()
    await asyncio.sleep(0)
    while not outbox.empty():
        await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    socket.close()
    context.term()


def _engine_thread(config: EngineConfig) -> type[StepThread] | type[PyptoThread]:
    """The engine that `--backend` names. PyPTO's is imported only when asked for."""
    if config.backend == "npu":
        from dsv4.pypto.process import PyptoThread

        return PyptoThread
    return StepThread


async def _send_all(socket: zmq.asyncio.Socket, outbox: asyncio.Queue[FromEngine]) -> None:
    while True:
        await socket.send(encode(await outbox.get()))


async def _receive_all(socket: zmq.asyncio.Socket, thread: StepThread | PyptoThread) -> None:
    while True:
        thread.inbox.put(decode_to_engine(await socket.recv()))


async def _beat(outbox: asyncio.Queue[FromEngine], thread: StepThread | PyptoThread) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        outbox.put_nowait(thread.heartbeat())


def _end_with_parent() -> None:
    """Block until the parent's end of standard input closes, then end the process at once."""
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    os._exit(0)


def _ask_kernel_to_end_with_parent() -> None:
    """Second line behind the pipe, for an end of the parent while this process cannot run Python code. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def main() -> None:
    """Entry point of `python -m dsv4.engine`."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="dsv4 engine: %(message)s")
    _ask_kernel_to_end_with_parent()
    line = sys.stdin.buffer.readline()
    if not line:
        return  # the parent is gone already
    launch = msgspec.json.decode(line, type=Launch)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    asyncio.run(serve(launch))
