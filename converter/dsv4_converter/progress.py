"""Progress events of long operations, and a tracker that emits them at a bounded rate from many threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

MIN_INTERVAL_SECONDS = 0.2


@dataclass(frozen=True)
class ProgressEvent:
    """One step of an operation.

    Attributes:
        kind: ``start``, ``advance``, ``file`` (one finished), ``note`` or ``done``.
        message: text for people; empty for ``advance``.
        bytes_done, bytes_total: of the whole operation, in source bytes.
        seconds: since the start.
        details: numbers belonging to the event, for machines.
    """

    kind: str
    message: str
    bytes_done: int
    bytes_total: int
    seconds: float
    details: dict[str, object] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Bytes a second so far."""
        return self.bytes_done / self.seconds if self.seconds > 0 else 0.0

    @property
    def remaining_seconds(self) -> float | None:
        """Estimate of the time left, None before anything is known."""
        return (self.bytes_total - self.bytes_done) / self.rate if self.rate > 0 else None


ProgressCallback = Callable[[ProgressEvent], None]


class ProgressTracker:
    """Counts bytes from several threads and calls back under a lock, so that a callback needs none of its own."""

    def __init__(self, callback: ProgressCallback | None, bytes_total: int) -> None:
        self._callback = callback
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._last_emitted = 0.0
        self.bytes_total = bytes_total
        self.bytes_done = 0

    def advance(self, num_bytes: int) -> None:
        """Count bytes; an event follows if the last one is long enough ago."""
        with self._lock:
            self.bytes_done += num_bytes
            now = time.monotonic()
            if now - self._last_emitted >= MIN_INTERVAL_SECONDS:
                self._last_emitted = now
                self._emit("advance", "", {})

    def emit(self, kind: str, message: str, **details: object) -> None:
        """Send an event now."""
        with self._lock:
            self._emit(kind, message, details)

    def _emit(self, kind: str, message: str, details: dict[str, object]) -> None:
        if self._callback is not None:
            seconds = time.monotonic() - self._started
            self._callback(ProgressEvent(kind, message, self.bytes_done, self.bytes_total, seconds, details))
