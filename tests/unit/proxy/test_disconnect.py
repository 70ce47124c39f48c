"""A client that goes away must free the engine; one that reads slowly must not cost memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from dsv4_clients.proxy import monitor

from tests.unit.proxy.conftest import StartProxy, until
from tests.unit.proxy.triton_double import EngineRequest, Failure, Reply, Step, TritonDouble, usage


async def send_raw(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> asyncio.StreamWriter:
    """A request on a connection of its own, which the test can close at any time."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    payload = json.dumps(body).encode()
    headers = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(payload))}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    writer.write("\r\n".join(lines).encode() + payload)
    await writer.drain()
    writer.reader = reader  # type: ignore[attr-defined]
    return writer


def endless(request: EngineRequest) -> Sequence[Step]:
    return [Reply("x", {"content": "x"}, after=0.01) for _ in range(2000)]


def never(request: EngineRequest) -> Sequence[Step]:
    return [Reply("x", {"content": "x"}, "stop", usage(1, 1), after=60.0)]


CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/completions", {"prompt": ["x", "y", "z"], "stream": True}),
    ],
)
@pytest.mark.parametrize("script", [never, endless], ids=["before the first token", "while streaming"])
async def test_disconnect_cancels_in_the_engine(
    client: httpx.AsyncClient, triton: TritonDouble, path: str, body: dict[str, Any], script: Any
) -> None:
    triton.script = script
    prompts = body.get("prompt")
    expected = len(prompts) if isinstance(prompts, list) else 1
    writer = await send_raw(client, path, body)
    await until(lambda: len(triton.requests) == expected)
    if script is endless:
        await until(lambda: all(request.sent > 2 for request in triton.requests))
    writer.close()
    closed_at = asyncio.get_running_loop().time()
    await until(lambda: all(request.cancelled_at is not None for request in triton.requests))
    delays = [(request.cancelled_at or 0) - closed_at for request in triton.requests]
    assert max(delays) < 1.0, "the aim is 0.1 s; a loaded machine gets more"


async def test_failure_of_one_choice_cancels_the_others(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    def script(request: EngineRequest) -> Sequence[Step]:
        if request.inputs["text_input"] == "bad":
            return [Failure("[INVALID_ARGUMENT] text_input: too long", after=0.05)]
        return endless(request)

    triton.script = script
    response = await client.post("/v1/completions", json={"prompt": ["a", "bad", "b"]})
    assert response.status_code == 400
    await until(
        lambda: all(request.cancelled_at for request in triton.requests if "bad" not in request.inputs["text_input"])
    )


async def test_slow_reader_holds_the_engine_back(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    total = 4000
    text = "x" * 10_000
    triton.script = lambda request: [Reply(text) for _ in range(total)] + [Reply("", None, "stop", usage(1, total))]
    writer = await send_raw(client, "/v1/completions", {"prompt": "x", "stream": True})
    await until(lambda: bool(triton.requests) and triton.requests[0].sent > 0)
    sent = -1
    while sent != triton.requests[0].sent:
        sent = triton.requests[0].sent
        await asyncio.sleep(0.5)
    assert sent < total, "40 MB were taken from the engine for a client that reads nothing"
    received = 0
    reader: asyncio.StreamReader = writer.reader  # type: ignore[attr-defined]
    tail = b""
    while b"[DONE]" not in tail:
        part = await reader.read(1 << 20)
        assert part, "the stream ended early"
        received += len(part)
        tail = (tail + part)[-64:]
    assert received > total * len(text)
    writer.close()


async def test_streams_end_when_the_model_process_dies(
    start_proxy: StartProxy, triton: TritonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "WATCH_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(monitor, "REPORT_AGE_SECONDS", 0.0)
    client = await start_proxy()
    triton.script = lambda request: [Reply("a", {"content": "a"}), Reply("b", {"content": "b"}, after=60)]
    triton.health_failure = Failure("Stub process 'deepseek_v4_0_0' is not healthy.")
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert '"code":"engine_dead"' in response.text
    assert response.text.endswith("data: [DONE]\n\n")


async def test_a_busy_engine_is_not_a_dead_one(
    start_proxy: StartProxy, triton: TritonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health requests time out, but tokens come: nothing is ended."""
    monkeypatch.setattr(monitor, "WATCH_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(monitor, "REPORT_AGE_SECONDS", 0.0)
    monkeypatch.setattr(monitor, "PROBE_TIMEOUT_SECONDS", 0.1)
    client = await start_proxy()
    pieces = [Reply("a", {"content": "a"}, after=0.02) for _ in range(60)]
    triton.script = lambda request: [*pieces, Reply("", {}, "stop", usage(1, 60))]
    triton.health_failure = Failure("late", after=60)
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert "error" not in response.text
    assert response.text.count('"content":"a"') == 60
