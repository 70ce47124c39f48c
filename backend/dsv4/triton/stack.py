"""tritonserver and the proxy as one foreground service: started, watched and stopped together."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from dsv4.errors import ConfigurationError, EngineStartError
from dsv4.triton.installation import TritonInstallation
from dsv4.triton.processes import ManagedProcess, describe_exit, port_is_free, remove_stale_shared_memory
from dsv4.triton.service import START_FAILURE_PREFIX

_TRITON_PROBLEM = re.compile(r"[WEF]\d{4} ")
# Lines that every machine without an NVIDIA card gets, and that mean nothing.
_TRITON_NOISE = ("CUDA", "Cuda", "NVML", "DCGM", "pinned_memory_manager")
_TRITON_LOG_LINE = re.compile(r"[IWEF]\d{4} |[+|]|$")
_KILL_GRACE_SECONDS = 15.0
_UNREADY_STOP_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class StackSettings:
    """Where to listen, what to serve, and how long to wait.

    Attributes:
        engine_environment: DSV4_* variables with the engine's flags.
        proxy_options: further command line options of the proxy.
        exit_timeout_seconds: how long running requests may take after SIGTERM.
    """

    model_repository: Path
    host: str = "127.0.0.1"
    port: int = 8225
    triton_address: str = "127.0.0.1"
    triton_http_port: int = 8000
    triton_grpc_port: int = 8001
    triton_metrics_port: int = 8002
    exit_timeout_seconds: int = 120
    start_timeout_seconds: float = 1800.0
    show_startup_logs: bool = False
    engine_environment: dict[str, str] = field(default_factory=dict)
    proxy_options: list[str] = field(default_factory=list)
    triton_options: list[str] = field(default_factory=list)


class ServingStack:
    """Runs until SIGINT, SIGTERM, or the end of one of its two processes."""

    def __init__(self, settings: StackSettings, installation: TritonInstallation, echo: Callable[[str], None]) -> None:
        self._settings = settings
        self._installation = installation
        self._echo = echo
        self._stop_requested = threading.Event()
        self._signals = 0
        self._ready = False
        self._start_failure: str | None = None
        self._processes: list[ManagedProcess] = []

    def run(self) -> int:
        """Serve; the exit status: 0 after a signal, 1 when a process ended by itself.

        Must be called in the main thread. Raises ConfigurationError for a port in use and EngineStartError with the
        engine's own reason when it cannot start.
        """
        self._check_ports()
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        started = time.time()
        try:
            self._start()
            if not self._wait_ready():
                return 0
            self._announce(time.time() - started)
            return self._watch()
        finally:
            self._stop()
            remove_stale_shared_memory(started - 1.0)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        self._stop_requested.set()
        if self._signals > 1:
            # The second signal means now.
            for process in self._processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)

    def _check_ports(self) -> None:
        settings = self._settings
        ports = {
            "--port": (settings.host, settings.port),
            "--triton-http-port": (settings.triton_address, settings.triton_http_port),
            "--triton-grpc-port": (settings.triton_address, settings.triton_grpc_port),
            "--triton-metrics-port": (settings.triton_address, settings.triton_metrics_port),
        }
        for option, (host, port) in ports.items():
            if [each for _, each in ports.values()].count(port) > 1:
                raise ConfigurationError(f"port {port} is given twice; choose another {option}")
            if not port_is_free(host, port):
                raise ConfigurationError(f"{host}:{port} is in use or cannot be bound; choose another {option}")

    def _start(self) -> None:
        settings = self._settings
        environment = {**os.environ, **self._installation.environment, **settings.engine_environment}
        environment.pop("DSV4_API_KEYS", None)  # the proxy's business alone
        triton = self._installation.command(
            f"--model-repository={settings.model_repository}",
            f"--http-address={settings.triton_address}",
            f"--http-port={settings.triton_http_port}",
            f"--grpc-address={settings.triton_address}",
            f"--grpc-port={settings.triton_grpc_port}",
            f"--metrics-address={settings.triton_address}",
            f"--metrics-port={settings.triton_metrics_port}",
            f"--exit-timeout-secs={settings.exit_timeout_seconds}",
            "--allow-gpu-metrics=false",
            *settings.triton_options,
        )
        proxy = [
            *(sys.executable, "-m", "dsv4_clients.proxy"),
            *("--host", settings.host, "--port", str(settings.port)),
            *("--triton", f"{settings.triton_address}:{settings.triton_grpc_port}"),
            *("--triton-metrics", f"http://{settings.triton_address}:{settings.triton_metrics_port}/metrics"),
            *settings.proxy_options,
        ]
        self._processes.append(ManagedProcess("tritonserver", triton, environment, self._on_triton_line))
        self._processes.append(ManagedProcess("proxy", proxy, os.environ, self._on_proxy_line))

    def _on_proxy_line(self, line: str) -> None:
        """While starting, only our own probes are in its log; if it cannot start, its last line is the error."""
        if self._ready:
            self._echo(line)

    def _on_triton_line(self, line: str) -> None:
        """Pass on the engine's lines, and of Triton's own the problems."""
        if START_FAILURE_PREFIX in line and self._start_failure is None:
            self._start_failure = line.partition(START_FAILURE_PREFIX)[2].strip()
            return
        problem = _TRITON_PROBLEM.match(line) and not any(word in line for word in _TRITON_NOISE)
        # While starting, Triton repeats the reason of a failed load several times; ours is reported at the end.
        wanted = self._settings.show_startup_logs or not _TRITON_LOG_LINE.match(line) or (problem and self._ready)
        if wanted and "NVML" not in line:
            self._echo(line)

    def _wait_ready(self) -> bool:
        """Wait for the proxy to say that the engine takes requests. False after a signal."""
        deadline = time.monotonic() + self._settings.start_timeout_seconds
        while not self._is_ready():
            if self._stop_requested.wait(0.2):
                return False
            for process in self._processes:
                status = process.poll()
                if status is not None:
                    raise EngineStartError(self._start_error(process, status))
            if time.monotonic() > deadline:
                raise EngineStartError(f"not ready after {self._settings.start_timeout_seconds:.0f} s")
        self._ready = True
        return True

    def _start_error(self, process: ManagedProcess, status: int) -> str:
        process.kill()  # nothing is lost: it has ended; its log is complete after this
        if self._start_failure is not None:
            return self._start_failure
        problems = [line for line in process.tail if _TRITON_PROBLEM.match(line) and "CUDA" not in line]
        last = (problems or list(process.tail) or ["no output"])[-1]
        return f"{process.name} {describe_exit(status)}: {last.strip()}"

    def _is_ready(self) -> bool:
        # Not through a proxy of the environment: the server is ours.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self._base_url()}/health/ready", timeout=5.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError, ValueError):
            return False

    def _base_url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self._settings.host, self._settings.host)
        scheme = "https" if "--tls-certificate" in self._settings.proxy_options else "http"
        return f"{scheme}://{host}:{self._settings.port}"

    def _announce(self, seconds: float) -> None:
        settings = self._settings
        self._echo(f"ready after {seconds:.1f} s")
        self._echo(f"  OpenAI API   {self._base_url()}/v1")
        self._echo(f"  Triton HTTP  http://{settings.triton_address}:{settings.triton_http_port}")
        self._echo(f"  Triton gRPC  {settings.triton_address}:{settings.triton_grpc_port}")
        self._echo(f"  metrics      {self._base_url()}/metrics")

    def _watch(self) -> int:
        while not self._stop_requested.wait(0.5):
            for process in self._processes:
                status = process.poll()
                if status is not None:
                    self._echo(f"{process.name} {describe_exit(status)}; stopping")
                    return 1
        self._echo("stopping: running requests may finish")
        return 0

    def _stop(self) -> None:
        """First the proxy, which drains its requests, then tritonserver."""
        # A server that is still loading has no requests to finish, and does not listen to signals.
        timeout = self._settings.exit_timeout_seconds + _KILL_GRACE_SECONDS if self._ready else _UNREADY_STOP_SECONDS
        for process in reversed(self._processes):
            ended = process.poll() is not None or process.terminate(timeout)
            if not ended and self._ready and self._signals < 2:
                self._echo(f"{process.name} did not end within {timeout:.0f} s and was killed")
            process.kill()


def environment_lines(installation: TritonInstallation) -> list[str]:
    """Shell lines after which a plain `tritonserver --model-repository …` works."""
    return [
        *(f"export {name}={shlex.quote(value)}" for name, value in installation.environment.items()),
        f'tritonserver() {{ {shlex.join(installation.command())} "$@"; }}',
    ]
