"""Many requests with random disconnects leave nothing behind, and every answer that survives is right."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections.abc import Sequence

import psutil
from dsv4_clients.openai_stream import make_client, stream_events

from tests.unit.proxy.conftest import StartProxy, until
from tests.unit.proxy.test_metrics_and_openapi import samples, value
from tests.unit.proxy.triton_double import EngineRequest, Reply, Step, TritonDouble, usage

REQUESTS = 120
CONCURRENCY = 32
PIECES = 10


def count_up(request: EngineRequest) -> Sequence[Step]:
    """Answers with the number in the prompt, piece by piece."""
    number = request.inputs["text_input"]
    pieces = [Reply(f"{number}.", token_ids=[1], after=0.001) for _ in range(PIECES)]
    return [*pieces, Reply("", None, "stop", usage(1, PIECES))]


async def test_nothing_leaks(start_proxy: StartProxy, triton: TritonDouble) -> None:
    client = await start_proxy()
    triton.script = count_up
    numbers = random.Random(1)
    process = psutil.Process()
    async with make_client(f"{client.base_url}/v1", None, connections=CONCURRENCY) as openai:
        slots = asyncio.Semaphore(CONCURRENCY)

        async def ask(number: int, leave_after: int | None) -> None:
            async with slots:
                text = ""
                events = stream_events(openai, "/completions", {"prompt": str(number)})
                chunks = 0
                async for chunk in events:
                    text += chunk["choices"][0]["text"]
                    chunks += 1
                    if leave_after is not None and chunks > leave_after:
                        break
                await events.aclose()
                expected = f"{number}." * PIECES
                assert expected.startswith(text)
                assert leave_after is not None or text == expected

        await ask(0, None)
        tasks_before, files_before = len(asyncio.all_tasks()), process.num_fds()
        leaving = [numbers.choice([None, None, 0, 1, 4]) for _ in range(REQUESTS)]
        await asyncio.gather(*(ask(number, leave_after) for number, leave_after in enumerate(leaving)))
    await until(lambda: all(request.cancelled_at or request.sent > PIECES for request in triton.requests))
    found = await samples(client)
    assert value(found, "dsv4_proxy_open_streams") == 0
    assert value(found, "dsv4_proxy_http_requests_running", endpoint="/v1/completions") == 0
    completed = sum(each is None for each in leaving) + 1
    assert value(found, "dsv4_proxy_generations_total", outcome="stop") >= completed
    assert value(found, "dsv4_proxy_generations_total", outcome="error") in (None, 0)
    gc.collect()
    await until(lambda: len(asyncio.all_tasks()) <= tasks_before + 2)
    await until(lambda: process.num_fds() <= files_before + 4)
    assert len(triton.requests) == REQUESTS + 1
    assert len({json.dumps(request.request_id) for request in triton.requests}) == REQUESTS + 1
