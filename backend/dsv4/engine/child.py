"""One life of an engine process as its parent sees it: launch, messages, end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from dsv4.config import EngineConfig
from dsv4.engine.messages import FromEngine, Launch, ToEngine, decode_from_engine, encode
from dsv4.errors import EngineStartError

STDERR_LINES = 20
KILL_SECONDS = 5.0


class EngineChild:
    """An engine process, its socket, and its private directory.

    `on_message` gets everything that the process sends; `on_exit` gets the exit code once the process is gone and all
    its messages were handled.
    """

    def __init__(self, on_message: Callable[[FromEngine], None], on_exit: Callable[[int], None]) -> None:
        self._on_message = on_message
        self._on_exit = on_exit
        self._directory: Path | None = None
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.last_stderr: deque[str] = deque(maxlen=STDERR_LINES)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def launch(self, config: EngineConfig) -> None:
        """Start the process. Raises EngineStartError when it cannot even be started."""
        # mkdtemp makes the directory private (0700): whoever can open the socket can drive the engine.
        self._directory = Path(tempfile.mkdtemp(prefix="dsv4-engine-"))
        address = f"ipc://{self._directory / 'socket'}"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        python = os.environ.get("DSV4_PYTHON") or sys.executable
        try:
            self._process = await asyncio.create_subprocess_exec(
                python,
                "-m",
                "dsv4.engine",
                stdin=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._clean_up()
            raise EngineStartError(f"the engine process cannot be started with {python}: {error}") from None
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(Launch(address, dataclasses.asdict(config))) + b"\n")
        with contextlib.suppress(ConnectionError):
            await self._process.stdin.drain()
        loop = asyncio.get_running_loop()
        receiving = loop.create_task(self._receive(self._socket))
        reading = loop.create_task(self._forward_stderr(self._process))
        self._tasks = [loop.create_task(self._watch(self._process, receiving, reading))]

    async def send(self, message: ToEngine) -> None:
        socket = self._socket
        if socket is None:
            return
        try:
            await socket.send(encode(message))
        except asyncio.CancelledError:
            # pyzmq cancels a send that still waits for the peer when the socket is closed: the process has ended, which
            # `on_exit` tells everybody. It must not look as if the caller had been cancelled.
            if self._socket is socket:
                raise

    def kill(self) -> None:
        """End the process and whatever it started at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self, timeout: float) -> None:
        """Wait for the end; after `timeout` seconds the process is killed."""
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=timeout)
            if pending:
                self.kill()
                await asyncio.wait(self._tasks, timeout=KILL_SECONDS)

    async def _watch(
        self, process: asyncio.subprocess.Process, receiving: asyncio.Task[None], reading: asyncio.Task[None]
    ) -> None:
        code = await process.wait()
        await asyncio.wait([reading], timeout=1.0)
        # Give the messages that are already in the socket a moment: the last one may say why the process ended.
        await asyncio.sleep(0.05)
        for task in (receiving, reading):
            task.cancel()
        await asyncio.gather(receiving, reading, return_exceptions=True)
        self._clean_up()
        self._on_exit(code)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            self._on_message(decode_from_engine(await socket.recv()))

    async def _forward_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while line := await process.stderr.readline():
            text = line.decode("utf-8", "replace")
            self.last_stderr.append(text.rstrip())
            sys.stderr.write(text)
            sys.stderr.flush()

    def _clean_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
