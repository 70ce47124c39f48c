"""Traces of a window of steps, in Chrome's format."""

from __future__ import annotations

import time
from pathlib import Path

import torch.profiler

from dsv4.errors import ErrorCode, RequestError
from dsv4.sampling_parameters import unsupported


class Profiler:
    """PyTorch's profiler around the steps between `start` and `stop`, which run in the thread of the steps."""

    def __init__(self, directory: Path | None) -> None:
        """`directory` gets the traces; None switches profiling off."""
        self._directory = directory
        self._running: torch.profiler.profile | None = None

    def start(self) -> None:
        """Begin a window. Raises RequestError UNSUPPORTED when off, INVALID_ARGUMENT when one is open."""
        if self._directory is None:
            raise unsupported("profile", "start the server with --profile-output DIRECTORY")
        if self._running is not None:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, "profile: a window is open already")
        self._running = torch.profiler.profile(record_shapes=True)
        self._running.start()

    def stop(self) -> Path:
        """End the window and write `trace-TIME.json`; its path. Raises RequestError INVALID_ARGUMENT without one."""
        if self._running is None or self._directory is None:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, "profile: no window is open")
        profile, self._running = self._running, None
        profile.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"trace-{time.strftime('%Y%m%d-%H%M%S')}.json"
        profile.export_chrome_trace(str(path))
        return path
