"""`dsv4 serve` and plain tritonserver: start, clean stop, and failures that say why."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil

from tests.integration.greedy import all_tokens
from tests.integration.server import (
    START_SECONDS,
    engine_process,
    free_ports,
    running_server,
    serve_command,
    test_environment,
    wait_for,
)

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "Huawei is"


def shared_memory_of(processes: list[psutil.Process]) -> set[Path]:
    """Regions of Triton's Python backend that these processes have mapped."""
    lines = [line for process in processes for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
    return {Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/triton_python_backend" in line}


def run_serve(*arguments: str, ports: list[int] | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        serve_command(ports or free_ports(4), *arguments),
        env=test_environment(**variables),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )


def speculation(drafts: int) -> tuple[str, str]:
    return "--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": drafts})


def test_three_drafts_give_the_same_tokens_and_stopping_leaves_nothing(greedy_tokens: dict[str, list[int]]) -> None:
    with running_server(*speculation(3)) as server:
        assert all_tokens(server) == greedy_tokens
        assert httpx.get(f"{server.api}/health/ready", trust_env=False).status_code == 200
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert any("dsv4.engine" in " ".join(process.cmdline()) for process in family)
        regions = shared_memory_of(family)
        assert regions
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0, server.log_text()
    wait_for(lambda: not any(process.is_running() for process in family), 10)
    assert not [region for region in regions if region.exists()]


def test_without_drafts_the_tokens_are_the_same_and_death_of_tritonserver_ends_serve(
    greedy_tokens: dict[str, list[int]],
) -> None:
    with running_server(*speculation(0)) as server:
        assert all_tokens(server) == greedy_tokens
        family = psutil.Process(server.process.pid).children(recursive=True)
        regions = shared_memory_of(family)
        triton = next(process for process in family if process.name() == "tritonserver")
        triton.kill()
        assert server.process.wait(60) == 1
        assert "tritonserver was ended by SIGKILL" in server.log_text()
    wait_for(lambda: not any(process.is_running() for process in family), 15)
    assert not [region for region in regions if region.exists()]


def test_repeated_deaths_of_the_engine_end_serve() -> None:
    with running_server(DSV4_MAX_RESTARTS="1") as server:
        for _ in range(2):
            wait_for(server.is_ready, 60, interval=0.2)
            engine_process(server).kill()
            wait_for(lambda: not server.is_ready(), 10)
        assert server.process.wait(60) == 1, server.log_text()


def test_port_in_use_is_one_line() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        result = run_serve(ports=[port, *free_ports(3)])
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(f"dsv4: error: 127.0.0.1:{port} is in use")
    assert "Traceback" not in result.stderr


def test_engine_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    result = run_serve("--model", str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("dsv4: error: ")
    assert str(tmp_path) in result.stderr
    assert "Traceback" not in result.stderr


def test_plain_tritonserver() -> None:
    """The environment that `--print-environment` prints is enough."""
    http_port, grpc_port, metrics_port = free_ports(3)
    options = f"--http-port {http_port} --grpc-port {grpc_port} --metrics-port {metrics_port}"
    addresses = "--http-address 127.0.0.1 --grpc-address 127.0.0.1 --metrics-address 127.0.0.1"
    script = (
        f'eval "$({sys.executable} -m dsv4.cli.main serve --print-environment)"\n'
        f"tritonserver --model-repository model_repository {options} {addresses}"
    )
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=ROOT,
        env=test_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{http_port}/v2/models/deepseek_v4/generate"

    def answers() -> bool:
        assert process.poll() is None, "tritonserver ended"
        try:
            body = {"text_input": PROMPT, "max_tokens": 2}
            return httpx.post(url, json=body, timeout=30, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for(answers, START_SECONDS, interval=0.3)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
