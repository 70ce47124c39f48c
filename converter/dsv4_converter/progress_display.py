"""Showing progress events: a bar on a terminal, log lines elsewhere, JSON lines on demand."""

from __future__ import annotations

import json
import sys
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from dsv4_converter.progress import ProgressEvent

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LOG_INTERVAL_SECONDS = 10.0


class ProgressDisplay:
    """A progress callback that is also a context manager.

    Args:
        json_lines: write one JSON object an event to standard output instead of text for people.
        stream: for text; standard error when None.
    """

    def __init__(self, *, json_lines: bool = False, stream: TextIO | None = None) -> None:
        self._json_lines = json_lines
        self._stream = stream or sys.stderr
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = 0.0

    def __enter__(self) -> ProgressDisplay:
        if not self._json_lines and self._stream.isatty():
            self._bar = _make_bar(self._stream)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: ProgressEvent) -> None:
        if self._json_lines:
            _write_json(event)
        elif event.kind == "done":
            # The caller prints the outcome itself.
            return
        elif self._bar is not None:
            self._update_bar(self._bar, event)
        else:
            self._log(event)

    def _update_bar(self, bar: Progress, event: ProgressEvent) -> None:
        if self._task is None:
            self._task = bar.add_task("", total=event.bytes_total)
        bar.update(self._task, completed=event.bytes_done, total=event.bytes_total)
        if event.kind == "file":
            bar.update(self._task, description=event.message)
        elif event.message:
            bar.console.print(event.message, markup=False, highlight=False)

    def _log(self, event: ProgressEvent) -> None:
        if not event.message and event.seconds - self._last_line < LOG_INTERVAL_SECONDS:
            return
        self._last_line = event.seconds
        text = event.message
        if event.kind in ("advance", "file"):
            text = f"{text or 'progress'}: {_describe(event)}"
        self._stream.write(text + "\n")
        self._stream.flush()


def _make_bar(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(file=stream),
    )


def _describe(event: ProgressEvent) -> str:
    share = 100 * event.bytes_done / event.bytes_total if event.bytes_total else 100.0
    remaining = event.remaining_seconds
    text = f"{event.bytes_done / 1e9:.2f} of {event.bytes_total / 1e9:.2f} GB ({share:.0f} %)"
    text += f", {event.rate / 1e9:.2f} GB/s"
    if remaining is not None and event.bytes_done < event.bytes_total:
        text += f", {remaining:.0f} s left"
    return text


def _write_json(event: ProgressEvent) -> None:
    content = {
        "event": event.kind,
        "message": event.message,
        "bytes_done": event.bytes_done,
        "bytes_total": event.bytes_total,
        "seconds": round(event.seconds, 3),
        **event.details,
    }
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()
