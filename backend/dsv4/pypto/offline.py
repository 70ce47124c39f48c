"""The PyPTO engine for programs without an event loop: `add` requests, then `step` while it `has_work`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from dsv4.config import EngineConfig
from dsv4.engine.protocol import GenerateRequest, RequestOutput
from dsv4.pypto.engine import PyptoEngine
from dsv4.pypto.requirements import check_devices, options_of


class OfflinePyptoEngine:
    """The verbs of `dsv4.engine.core.EngineCore` that offline generation uses. A context manager; loads on entry.

    Raises Dsv4Error subclasses with the reason when it cannot load.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[str], None]) -> None:
        check_devices(config)
        self._loop = asyncio.new_event_loop()
        self._engine = PyptoEngine(options_of(config, progress=progress), progress=progress)
        self._outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self._requests: set[asyncio.Task[None]] = set()

    def __enter__(self) -> OfflinePyptoEngine:
        self._loop.run_until_complete(self._engine.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._requests:
            task.cancel()
        self._loop.run_until_complete(self._engine.stop())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    @property
    def has_work(self) -> bool:
        """Whether outputs are to come."""
        return bool(self._requests) or not self._outputs.empty()

    def add(self, request: GenerateRequest) -> None:
        """Queue a request; one that cannot be served ends with an output that says why."""
        task = self._loop.create_task(self._run(request))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    def step(self) -> list[RequestOutput]:
        """Wait for outputs; everything that has arrived since the last call."""
        outputs = [self._loop.run_until_complete(self._outputs.get())]
        while not self._outputs.empty():
            outputs.append(self._outputs.get_nowait())
        # Lets the tasks of requests that have just ended finish, so that `has_work` turns false with the last output.
        self._loop.run_until_complete(asyncio.sleep(0.01))
        return outputs

    async def _run(self, request: GenerateRequest) -> None:
        async for output in self._engine.generate(request):
            self._outputs.put_nowait(output)
