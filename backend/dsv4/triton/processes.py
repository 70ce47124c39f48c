"""Child processes that are watched, end with their parent, and leave nothing behind."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TAIL_LINES = 200
_SHARED_MEMORY = Path("/dev/shm")
_REGION_PATTERN = "triton_python_backend_shm_region_*"


class ManagedProcess:
    """A child in a session of its own, so that Ctrl-C in a terminal reaches only us and we decide the order.

    Its standard output and error go line by line to `on_line`, called from a reader thread; the last lines are kept.
    Must be made in the main thread: the kernel sends the child SIGTERM when the thread that made it ends.
    """

    def __init__(
        self, name: str, command: list[str], environment: Mapping[str, str], on_line: Callable[[str], None]
    ) -> None:
        """Start the process. Raises OSError if it cannot be started."""
        self.name = name
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._on_line = on_line
        libc = ctypes.CDLL(None, use_errno=True)

        def die_with_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, name=f"{name}-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def terminate(self, timeout: float) -> bool:
        """Ask the process to end and wait; after `timeout` seconds kill its group. True if it ended by itself."""
        if self.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(timeout)
            return True
        except subprocess.TimeoutExpired:
            return False
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill what is left of the process group, and wait for the end of the log."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=2.0)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.tail.append(line.rstrip("\n"))
            self._on_line(line.rstrip("\n"))


def describe_exit(status: int) -> str:
    """`exited with status 1`, `was ended by SIGKILL`."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with contextlib.suppress(OSError):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return True
    return False


def remove_stale_shared_memory(since: float) -> int:
    """Delete shared memory regions of Triton's Python backend that no process has mapped; their number.

    A server that was killed leaves its regions behind. Only ours, made after `since` (seconds since the epoch), go.
    """
    regions = [path for path in _SHARED_MEMORY.glob(_REGION_PATTERN) if _is_ours(path, since)]
    mapped = set(_mapped_regions()) if regions else set()
    removed = 0
    for region in regions:
        if str(region) not in mapped:
            with contextlib.suppress(OSError):
                region.unlink()
                removed += 1
    return removed


def _is_ours(region: Path, since: float) -> bool:
    try:
        status = region.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and status.st_ctime >= since


def _mapped_regions() -> Iterator[str]:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            if "triton_python_backend_shm" in line:
                yield line.split(maxsplit=5)[-1].removesuffix(" (deleted)")


def wait_until(condition: Callable[[], bool], timeout: float, interval: float = 0.1) -> bool:
    """Poll until the condition holds; False after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(interval)
    return True
