"""Whether the engine takes requests, asked by a control request because Triton's own health endpoints cannot tell."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from dsv4.errors import ErrorCode, RequestError

from dsv4_clients.proxy.triton_client import TritonClient

PROBE_TIMEOUT_SECONDS = 3.0
REPORT_AGE_SECONDS = 0.25
WATCH_INTERVAL_SECONDS = 1.0
STRIKES_THAT_END_STREAMS = 4
ERROR_STRIKES = 2
TIMEOUT_STRIKES = 1
"""A dead model process answers with an error; silence may also mean that the machine is busy."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineReport:
    """`engine` is the engine's own health report, or the reason why there is none.

    `strikes` is 0 when there is a report, else how much the failure says about the death of the model's process.
    """

    ready: bool
    strikes: int
    engine: dict[str, Any] = field(default_factory=dict)


class EngineMonitor:
    """Probes the engine model, on request and, while streams are open, once a second.

    When the process of the Python model dies, Triton neither ends its streams nor turns unready. The watch notices
    that control requests fail, and ends the streams.
    """

    def __init__(self, client: TritonClient) -> None:
        self._client = client
        self._report = EngineReport(False, ERROR_STRIKES)
        self._reported_at = float("-inf")
        self._probing = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    @property
    def last_report(self) -> EngineReport:
        """The newest report; not ready before the first probe."""
        return self._report

    async def probe(self) -> EngineReport:
        """A report at most REPORT_AGE_SECONDS old; concurrent callers share one control request."""
        async with self._probing:
            if time.monotonic() - self._reported_at > REPORT_AGE_SECONDS:
                self._report = await self._ask()
                self._reported_at = time.monotonic()
            return self._report

    def start(self) -> None:
        """Start the watch."""
        self._watch = asyncio.ensure_future(self._watch_streams())

    async def stop(self) -> None:
        """Stop the watch."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    async def _ask(self) -> EngineReport:
        try:
            engine = await self._client.control("health", timeout_seconds=PROBE_TIMEOUT_SECONDS)
        except RequestError as error:
            strikes = TIMEOUT_STRIKES if error.code is ErrorCode.DEADLINE else ERROR_STRIKES
            return EngineReport(False, strikes, {"state": "unreachable", "error": str(error)})
        return EngineReport(bool(engine.get("ready")) and self._client.reachable, 0, engine)

    async def _watch_streams(self) -> None:
        strikes = 0
        while True:
            await asyncio.sleep(WATCH_INTERVAL_SECONDS)
            asked_at = time.monotonic()
            report = await self.probe() if self._client.open_streams else None
            if report is None or not report.strikes or self._client.last_message_at > asked_at:
                strikes = 0
                continue
            strikes += report.strikes
            if strikes >= STRIKES_THAT_END_STREAMS:
                _log.error("ending %d streams: %s", self._client.open_streams, report.engine.get("error"))
                message = "the engine model stopped answering"
                self._client.fail_open_streams(RequestError(ErrorCode.ENGINE_DEAD, message))
                strikes = 0
