"""Sending the load and measuring every answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from dsv4_clients.bench.workload import PATHS, Workload
from dsv4_clients.openai_stream import ServerError, make_client, stream_events


@dataclass
class RequestRecord:
    """One request: times in seconds since the run began, token counts from the server's usage."""

    started: float
    first_output: float | None = None
    ended: float = 0.0
    intervals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    error: str | None = None


async def run_workload(workload: Workload, on_finish: Callable[[RequestRecord], None]) -> list[RequestRecord]:
    """Send the whole load; `on_finish` is called after each request. Failed requests are records with `error`."""
    slots = asyncio.Semaphore(workload.concurrency)
    began = time.perf_counter()
    tasks: list[asyncio.Task[RequestRecord]] = []
    async with make_client(workload.base_url, workload.api_key, connections=workload.concurrency) as client:

        async def send(body: dict[str, Any]) -> RequestRecord:
            record = await _measure(client, PATHS[workload.endpoint], body, began)
            slots.release()
            on_finish(record)
            return record

        delays = workload.arrival_delays()
        try:
            for body in workload.bodies():
                await asyncio.sleep(next(delays))
                await slots.acquire()
                tasks.append(asyncio.create_task(send(body)))
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _measure(client: httpx.AsyncClient, path: str, body: dict[str, Any], began: float) -> RequestRecord:
    record = RequestRecord(time.perf_counter() - began)
    last = 0.0
    try:
        async for chunk in stream_events(client, path, body):
            now = time.perf_counter() - began
            if _has_output(chunk):
                if record.first_output is None:
                    record.first_output = now
                else:
                    record.intervals.append(now - last)
                last = now
            if chunk.get("usage"):
                _read_usage(record, chunk["usage"])
    except ServerError as error:
        record.error = str(error)
    record.ended = time.perf_counter() - began
    return record


def _has_output(chunk: dict[str, Any]) -> bool:
    """True for a chunk with text, reasoning or a tool call; the first chunk of a chat has only the role."""
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta") or {}
        if choice.get("text") or any(value for name, value in delta.items() if name != "role"):
            return True
    return False


def _read_usage(record: RequestRecord, usage: dict[str, Any]) -> None:
    record.prompt_tokens = usage.get("prompt_tokens") or 0
    record.completion_tokens = usage.get("completion_tokens") or 0
    details = usage.get("completion_tokens_details") or {}
    record.accepted_draft_tokens = details.get("accepted_prediction_tokens") or 0
    record.rejected_draft_tokens = details.get("rejected_prediction_tokens") or 0
