"""The process that upstream spawns for the devices: bound to our life, in a process group of its own.

Upstream's worker outlives a killed parent and then holds all devices, because it owns a writer end of its own queue
and so never sees its end. The real runner forks one process a chip from it. So the worker leads a process group, and
a small guardian process, forked before anything else happens, kills that group when the engine's process is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import select
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

WORKER_MODULE = "pypto_serving.serving.server.serving_worker"
_ENGINE_PID_VARIABLE = "DSV4_PYPTO_ENGINE_PID"
_REASON_FILE_VARIABLE = "DSV4_PYPTO_REASON_FILE"


def guard_workers(worker_module: ModuleType, reason_file: Path) -> None:
    """Make upstream spawn its worker through `guarded_entry`; the worker writes its errors to `reason_file`."""
    os.environ[_ENGINE_PID_VARIABLE] = str(os.getpid())
    os.environ[_REASON_FILE_VARIABLE] = str(reason_file)
    worker_module._worker_entry = guarded_entry  # type: ignore[attr-defined]


def guarded_entry(*arguments: Any, **keywords: Any) -> Any:
    """Runs in the spawned process: sets up the guardian, then becomes upstream's worker."""
    os.setpgid(0, 0)
    _fork_guardian(int(os.environ[_ENGINE_PID_VARIABLE]))
    # Upstream tells its parent only that loading failed; the reason is one line of the worker's log.
    logging.getLogger("pypto_serving").addHandler(_ReasonWriter(Path(os.environ[_REASON_FILE_VARIABLE])))
    return importlib.import_module(WORKER_MODULE)._worker_entry(*arguments, **keywords)


def read_reason(reason_file: Path) -> str:
    """The last error that the worker logged, as one line; empty when there is none."""
    try:
        return reason_file.read_text(encoding="utf-8")
    except OSError:
        return ""


class _ReasonWriter(logging.Handler):
    """Keeps the last error message in a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._path.write_text(" ".join(record.getMessage().split()), encoding="utf-8")


def kill_worker(process: Any) -> None:
    """Kill a worker with everything it forked, and reap it. `process` is upstream's; None is ignored."""
    if process is None or process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    # Before it has made its own group there is only the process itself.
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.join(timeout=10)


def _fork_guardian(engine_pid: int) -> None:
    worker_pid = os.getpid()
    if os.fork() != 0:
        return
    # The guardian: no Python clean-up, no file but its descriptors of the two processes.
    try:
        os.closerange(3, 1 << 16)
        if _outlives(engine_pid, worker_pid):
            os.killpg(worker_pid, signal.SIGKILL)
    finally:
        os._exit(0)


def _outlives(engine_pid: int, worker_pid: int) -> bool:
    """Wait until one of the processes ends; whether the engine's was the first."""
    poll = select.poll()
    try:
        engine = os.pidfd_open(engine_pid)
    except ProcessLookupError:
        return True
    poll.register(engine, select.POLLIN)
    poll.register(os.pidfd_open(worker_pid), select.POLLIN)
    return engine in {descriptor for descriptor, _ in poll.poll()}
