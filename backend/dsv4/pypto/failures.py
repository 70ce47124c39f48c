"""What went wrong inside upstream: device error numbers from its log, and a worker that is dead or stuck."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any

from dsv4.errors import ErrorCode, RequestError

UPSTREAM_LOGGER = "pypto_serving"
_ACL_ERROR = re.compile(r"(?<!\d)(10[07]\d{3}|20[07]\d{3}|50[07]\d{3})(?!\d)")
_MESSAGE_CHARACTERS = 300


class LastError(logging.Handler):
    """Remembers the last error that upstream logged: its outputs say only `error`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.ERROR)
        self._clock = clock
        self._message = ""
        self._at = float("-inf")

    def emit(self, record: logging.LogRecord) -> None:
        self._message, self._at = record.getMessage(), self._clock()

    def as_request_error(self, within_seconds: float = 5.0) -> RequestError:
        """A DEVICE_ERROR with the number of the device's error where upstream logged one just now."""
        recent = self._clock() - self._at <= within_seconds
        text = " ".join(self._message.split())[:_MESSAGE_CHARACTERS] if recent else ""
        match = _ACL_ERROR.search(text)
        return RequestError(
            ErrorCode.DEVICE_ERROR,
            "a step failed on the device" + (f": {text}" if text else ""),
            detail=int(match[1]) if match else None,
        )


class Watchdog:
    """Looks at one engine core. `reason` says why it will not answer any more."""

    def __init__(self, core: Any, step_timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._timeout = step_timeout_seconds
        self._clock = clock
        self._applied = -1
        self._progress_at = clock()

    def reason(self) -> str | None:
        """Why the engine is lost; None while it works. To be called regularly."""
        process = getattr(self._core, "_worker_process", None)
        if process is not None and not process.is_alive():
            return f"the worker process ended with exit code {process.exitcode}"
        loop_task = getattr(self._core, "_loop_task", None)
        if loop_task is not None and loop_task.done():
            failure = None if loop_task.cancelled() else loop_task.exception()
            return f"the engine loop ended: {failure!r}"
        if self.step_age() > self._timeout:
            return f"no step has ended for {self._timeout:g} s"
        return None

    def step_age(self) -> float:
        """Seconds since the oldest step in flight changed, 0 without one."""
        in_flight = getattr(self._core, "_batch_queue", ())
        waited_for = self._core._step_counter - len(in_flight)
        busy = self._core.scheduler.has_work()
        if not busy or waited_for != self._applied:
            self._applied = waited_for
            self._progress_at = self._clock()
        return self._clock() - self._progress_at
