"""Envoy with the shipped configuration in front of three replicas: balance, death, drain, stickiness, gRPC."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from tritonclient.grpc import aio as triton_grpc

from tests.integration.envoy_process import ROOT, EnvoyProcess, free_ports

pytestmark = pytest.mark.integration
NAMES = ("a", "b", "c")
WAIT_SECONDS = 60.0


@dataclass
class Replicas:
    """The stand-in processes by name."""

    http: dict[str, int]
    grpc: dict[str, int]
    processes: dict[str, subprocess.Popen[bytes]]

    def start(self, name: str) -> None:
        module = [sys.executable, "-m", "tests.integration.stand_in_replica"]
        arguments = [*module, name, str(self.http[name]), str(self.grpc[name])]
        self.processes[name] = subprocess.Popen(arguments, cwd=ROOT)

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()


@dataclass
class Outcome:
    """What one client saw. `replica` is empty when no byte of an answer arrived."""

    status: int = 0
    replica: str = ""
    ticks: int = 0
    complete: bool = False


@dataclass
class Stack:
    """Replicas, Envoy and a client of it."""

    replicas: Replicas
    envoy: EnvoyProcess
    client: httpx.AsyncClient

    async def complete(self, ticks: int = 3, **options: Any) -> Outcome:
        outcome = Outcome()
        headers = options.pop("headers", None)
        try:
            async with self.client.stream(
                "POST", "/v1/completions", json={"ticks": ticks, **options}, headers=headers
            ) as response:
                outcome.status = response.status_code
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        outcome.complete = True
                    elif line.startswith("data: "):
                        outcome.replica = json.loads(line[6:])["replica"]
                        outcome.ticks += 1
        except httpx.TransportError:
            pass
        return outcome

    async def set_ready(self, name: str, ready: bool) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.post(f"http://127.0.0.1:{self.replicas.http[name]}/control", json={"ready": ready})

    async def healthy(self, cluster: str = "proxies") -> set[str]:
        """Names of the replicas that Envoy would send a request to."""
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"http://127.0.0.1:{self.envoy.admin}/clusters?format=json")
        ports = {port: name for name, port in {**self.replicas.http}.items()}
        ports |= {port: name for name, port in self.replicas.grpc.items()}
        for status in answer.json()["cluster_statuses"]:
            if status["name"] == cluster:
                return {
                    ports[host["address"]["socket_address"]["port_value"]]
                    for host in status.get("host_statuses", [])
                    if host["health_status"] == {"eds_health_status": "HEALTHY"}
                }
        return set()

    async def wait_for_healthy(self, names: set[str], cluster: str = "proxies") -> None:
        await wait_until(lambda: self.healthy(cluster), lambda found: found == names)


async def wait_until(observe: Callable[[], Any], accept: Callable[[Any], bool]) -> None:
    """Poll until an observation is accepted. Fails with the last one."""
    last: Any = None
    for _ in range(int(WAIT_SECONDS / 0.1)):
        try:
            last = await observe()
        except httpx.TransportError as failure:
            last = failure
        else:
            if accept(last):
                return
        await asyncio.sleep(0.1)
    pytest.fail(f"never seen; last: {last}")


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Replicas, EnvoyProcess]]:
    """Three replicas and Envoy for all tests of this file."""
    ports = free_ports(6)
    replicas = Replicas(dict(zip(NAMES, ports[:3], strict=True)), dict(zip(NAMES, ports[3:], strict=True)), {})
    envoy = EnvoyProcess(tmp_path_factory.mktemp("envoy"), list(replicas.http.values()), list(replicas.grpc.values()))
    yield replicas, envoy
    envoy.stop()
    for name in NAMES:
        replicas.kill(name)


@pytest.fixture
async def stack(processes: tuple[Replicas, EnvoyProcess]) -> AsyncIterator[Stack]:
    """All three replicas ready and known to Envoy, whatever the test before did."""
    replicas, envoy = processes
    for name in NAMES:
        if name not in replicas.processes or replicas.processes[name].poll() is not None:
            replicas.start(name)
    envoy.write_replicas(list(replicas.http.values()), list(replicas.grpc.values()))
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{envoy.http}",
        timeout=WAIT_SECONDS,
        limits=httpx.Limits(max_connections=200),
        trust_env=False,
    ) as client:
        running = Stack(replicas, envoy, client)
        for name in NAMES:
            await wait_until(lambda name=name: running.set_ready(name, True), lambda answer: True)  # type: ignore[misc]
        for cluster in ("proxies", "proxies_by_prefix", "tritons"):
            await running.wait_for_healthy(set(NAMES), cluster)
        yield running


async def test_requests_spread_over_the_replicas(stack: Stack) -> None:
    outcomes = await asyncio.gather(*(stack.complete() for _ in range(30)))
    assert all(outcome.complete for outcome in outcomes)
    assert set(Counter(outcome.replica for outcome in outcomes)) == set(NAMES)


async def test_a_replica_killed_under_load_loses_only_what_it_had_started(stack: Stack) -> None:
    """Many more requests than slots: most wait in a replica without a byte sent when it dies."""
    before = await _started(stack, "b")
    running = [asyncio.create_task(stack.complete(ticks=40)) for _ in range(60)]
    await wait_until(lambda: _started(stack, "b"), lambda started: started >= before + 3)
    stack.replicas.kill("b")
    outcomes = await asyncio.gather(*running)
    broken = [outcome for outcome in outcomes if not outcome.complete]
    assert broken, "nothing was running on the killed replica, so the test shows nothing"
    # Status 200 with an answer cut off is a request that had started; one that had not has no status, or 503.
    assert {outcome.status for outcome in outcomes} == {200}, stack.envoy.unsuccessful_requests()
    assert all(outcome.replica in {"b", ""} for outcome in broken), broken

    await stack.wait_for_healthy({"a", "c"})
    afterwards = await asyncio.gather(*(stack.complete() for _ in range(12)))
    assert all(outcome.complete and outcome.replica in {"a", "c"} for outcome in afterwards)

    stack.replicas.start("b")
    await stack.wait_for_healthy(set(NAMES))
    returned = await asyncio.gather(*(stack.complete() for _ in range(30)))
    assert all(outcome.complete for outcome in returned)
    assert "b" in {outcome.replica for outcome in returned}


async def _started(stack: Stack, name: str) -> int:
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"http://127.0.0.1:{stack.replicas.http[name]}/health/ready")
    return int(answer.json()["started"])


async def test_a_draining_replica_keeps_its_streams_and_gets_no_new_ones(stack: Stack) -> None:
    """The stream ends by itself well after Envoy has seen the replica become unready."""
    before = await _started(stack, "a")
    streams = [asyncio.create_task(stack.complete(ticks=200)) for _ in range(6)]
    await wait_until(lambda: _started(stack, "a"), lambda started: started >= before + 1)
    await stack.set_ready("a", False)
    await stack.wait_for_healthy({"b", "c"})
    during = await asyncio.gather(*(stack.complete() for _ in range(8)))
    assert {outcome.replica for outcome in during} <= {"b", "c"}
    outcomes = await asyncio.gather(*streams)
    assert all(outcome.complete and outcome.ticks == 200 for outcome in outcomes)
    assert "a" in {outcome.replica for outcome in outcomes}


async def test_without_a_ready_replica_the_answer_is_503_at_once(stack: Stack) -> None:
    for name in NAMES:
        await stack.set_ready(name, False)
    await stack.wait_for_healthy(set())
    assert (await stack.complete()).status == 503
    await stack.set_ready("c", True)
    await stack.wait_for_healthy({"c"})
    assert (await stack.complete()).replica == "c"


async def test_a_named_prefix_stays_with_its_replica_as_long_as_that_lives(stack: Stack) -> None:
    async def served_by(prefix: str) -> str:
        return (await stack.complete(headers={"x-dsv4-prefix": prefix})).replica

    await stack.wait_for_healthy(set(NAMES), "proxies_by_prefix")
    home = await served_by("tenant-1")
    assert {await served_by("tenant-1") for _ in range(6)} == {home}
    assert {await served_by(f"tenant-{i}") for i in range(24)} == set(NAMES)
    stack.replicas.kill(home)
    await stack.wait_for_healthy(set(NAMES) - {home}, "proxies_by_prefix")
    assert await served_by("tenant-1") in set(NAMES) - {home}


async def test_refusals_are_passed_on_and_not_tried_elsewhere(stack: Stack) -> None:
    before = await _retries(stack)
    assert (await stack.complete(refuse=True)).status == 429
    assert await _retries(stack) == before


async def _retries(stack: Stack) -> int:
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"http://127.0.0.1:{stack.envoy.admin}/stats?filter=proxies.upstream_rq_retry$")
    return int(answer.text.split()[-1])


async def test_replicas_can_be_taken_out_and_added_while_running(stack: Stack) -> None:
    names = ("a", "c")
    stack.envoy.write_replicas([stack.replicas.http[n] for n in names], [stack.replicas.grpc[n] for n in names])
    await stack.wait_for_healthy(set(names))
    outcomes = await asyncio.gather(*(stack.complete() for _ in range(12)))
    assert {outcome.replica for outcome in outcomes} == set(names)
    stack.envoy.write_replicas(list(stack.replicas.http.values()), list(stack.replicas.grpc.values()))
    await stack.wait_for_healthy(set(NAMES))


async def test_one_grpc_connection_reaches_all_replicas_and_survives_one(stack: Stack) -> None:
    client = triton_grpc.InferenceServerClient(f"127.0.0.1:{stack.envoy.grpc}")
    try:
        assert {(await client.get_server_metadata()).name for _ in range(30)} == set(NAMES)
        stack.replicas.kill("a")
        await stack.wait_for_healthy({"b", "c"}, "tritons")
        assert {(await client.get_server_metadata()).name for _ in range(20)} == {"b", "c"}
    finally:
        await client.close()
