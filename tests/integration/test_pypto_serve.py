"""`dsv4 serve --backend npu`: proxy, tritonserver, our model and the PyPTO adapter, over upstream or its double."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.envoy_process import free_ports
from tests.pypto.checkpoint import FIRST_BYTE, write_checkpoint
from tests.pypto.contract import Contract, contract_under_test

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
WAIT_SECONDS = 300.0

# The flags of the documented serving command, with chunks of the stand-in's size.
FLAGS = [
    *("--served-model-name", "dsv4-flash-w8a8", "--backend", "npu", "--platform", "a2a3"),
    *("--devices", "0,1,2,3,4,5,6,7", "--dp", "8", "--ep", "8", "--tp", "1", "--block-size", "128"),
    *("--max-model-len", "512", "--max-num-seqs", "32", "--max-num-batched-tokens", "512"),
    *("--long-prefill-token-threshold", "128", "--no-enable-prefix-caching"),
    *("--speculative-config", '{"method":"mtp","num_speculative_tokens":3}'),
    *("--ring-dep-pool", "131072", "--ring-task-window", "131072", "--ring-heap", "2147483648"),
    "--show-startup-logs",
]


@dataclass
class Server:
    """A running `dsv4 serve`."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def device_worker(self) -> psutil.Process:
        """The process that upstream spawned for the devices."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        engines = [p for p in family if "dsv4.engine" in p.cmdline()]
        (worker,) = [c for e in engines for c in e.children() if any("spawn_main" in part for part in c.cmdline())]
        return worker


@pytest.fixture(scope="module")
def contract() -> Contract:
    return contract_under_test()


@pytest.fixture(scope="module")
def server(contract: Contract, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("pypto-serve")
    port, http, grpc, metrics = free_ports(4)
    ports = ["--port", port, "--triton-http-port", http, "--triton-grpc-port", grpc, "--triton-metrics-port", metrics]
    command = [sys.executable, "-m", "dsv4.cli.main", "serve", "--model", write_checkpoint(directory / "dsv4"), *FLAGS]
    environment = {**os.environ, **contract.environment, "DSV4_CACHE_DIR": str(directory / "cache")}
    log = directory / "serve.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(part) for part in (*command, *ports)], env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    running = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        asyncio.run(ready(running))
        yield running
    finally:
        process.terminate()
        assert process.wait(timeout=120) == 0, log.read_text(errors="replace")[-4000:]


async def ready(server: Server, restarts: int = 0) -> None:
    """Wait until the server takes requests, after its engine was replaced so many times."""
    async with httpx.AsyncClient(trust_env=False) as client:
        for _ in range(int(WAIT_SECONDS / 0.25)):
            assert server.process.poll() is None, server.log.read_text(errors="replace")[-4000:]
            try:
                answer = await client.get(f"{server.url}/health/ready", timeout=10)
                if answer.status_code == 200 and answer.json()["engine"]["restarts"] == restarts:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.25)
    pytest.fail("never ready: " + server.log.read_text(errors="replace")[-4000:])


def expected(contract: Contract, prompt: str, count: int) -> str:
    tokens = contract.reference([FIRST_BYTE + byte for byte in prompt.encode()], count)
    return bytes(token - FIRST_BYTE for token in tokens).decode()


async def complete(client: httpx.AsyncClient, prompt: str, **options: Any) -> httpx.Response:
    body = {"model": "dsv4-flash-w8a8", "prompt": prompt, "max_tokens": 40, **options}
    return await client.post("/v1/completions", json=body)


def client_of(server: Server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=100)
    return httpx.AsyncClient(base_url=server.url, timeout=WAIT_SECONDS, limits=limits, trust_env=False)


async def test_64_clients_get_the_right_text(server: Server, contract: Contract) -> None:
    prompts = [f"client {number} asks for {number * 7}" for number in range(64)]
    async with client_of(server) as client:
        answers = await asyncio.gather(*(complete(client, prompt) for prompt in prompts))
    assert [answer.status_code for answer in answers] == [200] * 64, {answer.text for answer in answers}
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts == [expected(contract, prompt, 40) for prompt in prompts]


async def test_stop_strings_and_refusals_come_through(server: Server, contract: Contract) -> None:
    whole = expected(contract, "stop here", 40)
    async with client_of(server) as client:
        stopped = await complete(client, "stop here", stop=[whole[5:8]])
        refused = await complete(client, "hot", temperature=0.9)
    assert stopped.json()["choices"][0]["text"] == whole[: whole.index(whole[5:8])]
    assert stopped.json()["choices"][0]["finish_reason"] == "stop"
    assert refused.status_code == 400
    assert "temperature" in refused.json()["error"]["message"]


async def test_a_killed_worker_is_replaced_and_clients_are_told(server: Server, contract: Contract) -> None:
    """The last test of this file: the server restarts its engine by itself."""
    before = server.device_worker()
    async with client_of(server) as client:
        running = [asyncio.create_task(complete(client, f"long {number}", max_tokens=400)) for number in range(16)]
        await asyncio.sleep(0.3)
        os.kill(before.pid, signal.SIGKILL)
        answers = await asyncio.gather(*running)
        assert {answer.status_code for answer in answers} <= {200, 503}, [answer.text for answer in answers]
        await ready(server, restarts=1)
        again = await complete(client, "after the fall")
    assert again.status_code == 200, again.text
    assert again.json()["choices"][0]["text"] == expected(contract, "after the fall", 40)
    assert server.device_worker().pid != before.pid
