"""A real server for tests: `dsv4 serve` on free ports, with what tests want to know about it."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

START_SECONDS = 180.0
STOP_SECONDS = 60.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@dataclass
class Server:
    """A running `dsv4 serve`."""

    process: subprocess.Popen[str]
    log: collections.deque[str]
    port: int
    http_port: int
    grpc_port: int
    metrics_port: int

    @property
    def api(self) -> str:
        """Base URL of the proxy."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def http(self) -> str:
        """Base URL of Triton's HTTP endpoint."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc(self) -> str:
        """Address of Triton's gRPC endpoint."""
        return f"127.0.0.1:{self.grpc_port}"

    def generate(self, model: str = "deepseek_v4", timeout: float = 60.0, **fields: Any) -> httpx.Response:
        """One request to Triton's generate endpoint."""
        return httpx.post(f"{self.http}/v2/models/{model}/generate", json=fields, timeout=timeout, trust_env=False)

    def control(self, command: str, **parameters: str) -> dict[str, Any]:
        """The answer to a control request."""
        response = self.generate(control=command, **parameters)
        assert response.status_code == 200, response.text
        return json.loads(response.json()["text_output"])

    def stats(self) -> dict[str, Any]:
        """The engine's counters."""
        return self.control("stats")

    def is_ready(self) -> bool:
        """Whether the engine takes requests; no when there is no server either."""
        try:
            return bool(self.control("health")["ready"])
        except httpx.TransportError:
            return False

    def log_text(self) -> str:
        """The last lines of the log."""
        return "\n".join(self.log)

    def stop(self) -> int:
        """Exit status after SIGTERM."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def serve_command(ports: list[int], *arguments: str) -> list[str]:
    """`dsv4 serve` on four ports: proxy, Triton HTTP, gRPC, metrics."""
    options = ("--port", "--triton-http-port", "--triton-grpc-port", "--triton-metrics-port")
    port_arguments = [text for option, port in zip(options, ports, strict=True) for text in (option, str(port))]
    return [sys.executable, "-m", "dsv4.cli.main", "serve", *port_arguments, "--exit-timeout-secs", "20", *arguments]


def test_environment(**variables: str) -> dict[str, str]:
    """One thread: the tests share few cores, and the nano model gains nothing from more."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **variables}


test_environment.__test__ = False  # type: ignore[attr-defined]


@contextlib.contextmanager
def running_server(*arguments: str, **variables: str) -> Iterator[Server]:
    """`dsv4 serve` with more arguments and environment variables, ready; stopped at the end."""
    ports = free_ports(4)
    process = subprocess.Popen(
        serve_command(ports, *arguments),
        env=test_environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    server = Server(process, collections.deque(maxlen=500), *ports)
    ready, started = threading.Event(), threading.Event()

    def read_log() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.log.append(line.rstrip("\n"))
            if line.startswith("ready after"):
                ready.set()
                started.set()
        started.set()  # it has ended

    threading.Thread(target=read_log, daemon=True).start()
    try:
        assert started.wait(START_SECONDS), f"not ready in time:\n{server.log_text()}"
        assert ready.is_set(), f"ended while starting:\n{server.log_text()}"
        yield server
    finally:
        server.stop()


def wait_for(condition: Any, timeout: float, interval: float = 0.02) -> float:
    """Poll until the condition holds and say how long it took; fail after `timeout` seconds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout, f"not within {timeout} s"
        time.sleep(interval)
    return time.monotonic() - started


def engine_process(server: Server) -> psutil.Process:
    """The engine's process below the server."""
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "dsv4.engine" in child.cmdline():
                return child
    raise AssertionError("no engine process")
