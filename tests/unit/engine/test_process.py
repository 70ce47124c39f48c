"""The engine process and its client: start, death, hang, restart, end of the parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from dsv4.config import EngineConfig
from dsv4.engine.client import EngineClient
from dsv4.engine.protocol import FinishReason, GenerateRequest, RequestOutput
from dsv4.errors import EngineStartError, RequestError
from dsv4.sampling_parameters import SamplingParameters

VECTORS = Path(__file__).resolve().parents[2] / "data" / "model"
TOLD_SECONDS = 5.0


def make_config(**flags: object) -> EngineConfig:
    return EngineConfig.build(
        environment={}, overrides={"model": str(VECTORS), "max_model_len": 512, "num_threads": 1, **flags}
    )


def make_request(name: str, max_tokens: int = 4, **fields: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=[3, 1, 4, 1, 5],
        sampling_parameters=SamplingParameters(max_tokens=max_tokens, ignore_eos=True),
        **fields,  # type: ignore[arg-type]
    )


async def collect(client: EngineClient, request: GenerateRequest) -> list[RequestOutput]:
    return [output async for output in client.generate(request)]


@contextlib.asynccontextmanager
async def running(config: EngineConfig | None = None) -> AsyncIterator[EngineClient]:
    client = EngineClient(config or make_config())
    await client.start()
    try:
        yield client
    finally:
        await client.stop(drain_seconds=0.0)


async def until_ready(client: EngineClient) -> None:
    while not (await client.health())["ready"]:
        await asyncio.sleep(0.05)


async def test_generate_stats_and_stop() -> None:
    progress: list[str] = []
    client = EngineClient(make_config(), on_progress=progress.append)
    await client.start()
    answers = await asyncio.gather(*(collect(client, make_request(str(index), 6)) for index in range(5)))
    tokens = [[token for output in outputs for token in output.token_ids] for outputs in answers]
    assert all(each == tokens[0] and len(each) == 6 for each in tokens)
    assert all(outputs[-1].finish_reason is FinishReason.LENGTH for outputs in answers)
    assert answers[0][-1].usage is not None
    assert answers[0][-1].usage.completion_tokens == 6
    stats = await client.stats()
    assert (stats["running"], stats["waiting"], stats["kv_cache_usage"]) == (0, 0, 0.0)
    assert any("weights" in line for line in progress)
    pid = (await client.health())["pid"]
    await client.stop()
    assert not psutil.pid_exists(pid)
    assert "[DRAINING]" in str((await collect(client, make_request("late")))[-1].error)


async def test_leaving_the_iteration_aborts() -> None:
    async with running() as client:
        outputs = client.generate(make_request("long", 500))
        await outputs.__anext__()
        assert (await client.stats())["running"] == 1
        await outputs.aclose()
        while (await client.stats())["running"]:
            await asyncio.sleep(0.02)
        assert (await client.stats())["kv_cache_usage"] == 0.0


async def test_start_failure_has_the_engines_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_FAULT_START", "the accelerator is on fire")
    with pytest.raises(EngineStartError, match="the accelerator is on fire"):
        await EngineClient(make_config()).start()


async def test_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"config\.json"):
        await EngineClient(make_config(model=str(tmp_path))).start()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_every_open_request_hears_of_the_death_and_serving_resumes(number: signal.Signals) -> None:
    async with running() as client:
        before = await collect(client, make_request("before"))
        streams = [client.generate(make_request(str(index), 500)) for index in range(4)]
        for stream in streams:
            await stream.__anext__()
        pid = (await client.health())["pid"]
        os.kill(pid, number)

        async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
            return [output async for output in stream][-1]

        ends = await asyncio.wait_for(asyncio.gather(*map(last, streams)), TOLD_SECONDS)
        assert all("[ENGINE_DEAD]" in str(end.error) for end in ends)
        await until_ready(client)
        assert (await client.health())["pid"] != pid
        assert (await client.health())["restarts"] == 1
        after = await collect(client, make_request("after"))
        assert [output.token_ids for output in after] == [output.token_ids for output in before]


async def test_a_step_that_hangs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_FAULT_HANG_AT_STEP", "3")
    async with running() as client:
        monkeypatch.delenv("DSV4_FAULT_HANG_AT_STEP")
        await collect(client, make_request("two steps", 2))
        outputs = await asyncio.wait_for(collect(client, make_request("stuck", 50)), TOLD_SECONDS + 1.0)
        assert "[ENGINE_DEAD]" in str(outputs[-1].error)
        assert "hangs" in str(outputs[-1].error)
        await until_ready(client)


async def test_an_engine_that_keeps_dying_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_FAULT_CRASH_AT_STEP", "2")
    async with running(make_config(max_restarts=1)) as client:
        for attempt in range(2):
            outputs = await collect(client, make_request(f"try {attempt}", 8))
            assert "[ENGINE_DEAD]" in str(outputs[-1].error)
            while (await client.health())["state"] == "restarting":
                await asyncio.sleep(0.05)
        assert (await client.health())["state"] == "failed"
        assert "[ENGINE_DEAD]" in str((await collect(client, make_request("refused")))[-1].error)
        with pytest.raises(RequestError, match="will not be started again"):
            await client.stats()


async def test_a_restart_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as client:
        monkeypatch.setenv("DSV4_FAULT_START", "no device")
        os.kill((await client.health())["pid"], signal.SIGKILL)
        while (await client.health())["reason"] != "no device":
            await asyncio.sleep(0.05)
        failed = (await client.health())["pid"]
        monkeypatch.delenv("DSV4_FAULT_START")
        await until_ready(client)
        assert not psutil.pid_exists(failed)
        assert (await client.health())["restarts"] == 2
        assert (await collect(client, make_request("after")))[-1].finish_reason == FinishReason.LENGTH


PARENT = """
import asyncio, sys
from tests.unit.engine.test_process import make_config, make_request
from dsv4.engine.client import EngineClient

async def main():
    client = EngineClient(make_config())
    await client.start()
    async for _ in client.generate(make_request("endless", 500)):
        print((await client.health())["pid"], flush=True)

asyncio.run(main())
"""


def test_no_orphan_when_the_parent_is_killed() -> None:
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        engine.wait(timeout=TOLD_SECONDS)


async def test_deadline_and_refusals() -> None:
    async with running(make_config(max_num_seqs=1, max_queued_requests=1)) as client:
        first = client.generate(make_request("first", 500))
        await first.__anext__()
        second = asyncio.create_task(collect(client, make_request("second", timeout_seconds=0.3)))
        while not (await client.stats())["waiting"]:
            await asyncio.sleep(0.01)
        third = await collect(client, make_request("third"))
        assert "[QUEUE_FULL]" in str(third[-1].error)
        assert "[DEADLINE]" in str((await second)[-1].error)
        assert "already running" in str((await collect(client, make_request("first")))[-1].error)
        outside = GenerateRequest(request_id="outside", prompt_token_ids=[97])
        assert "input_ids: token 97" in str((await collect(client, outside))[-1].error)
        with pytest.raises(RequestError, match="profile-output"):
            await client.profile("start")
        await first.aclose()
