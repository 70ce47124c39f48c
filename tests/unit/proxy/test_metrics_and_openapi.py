from __future__ import annotations

import asyncio
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.proxy.conftest import StartProxy, until
from tests.unit.proxy.test_disconnect import CHAT, endless, send_raw
from tests.unit.proxy.triton_double import Failure, TritonDouble


async def samples(client: httpx.AsyncClient) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = (await client.get("/metrics")).text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(values: dict[Any, float], name: str, **labels: str) -> float | None:
    return values.get((name, tuple(sorted(labels.items()))))


async def test_requests_and_tokens_are_counted(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    await client.post("/v1/chat/completions", json={**CHAT, "temperature": 9})
    await client.get("/never/heard/of")
    triton.script = lambda request: [Failure("[QUEUE_FULL] 1")]
    await client.post("/v1/completions", json={"prompt": "x"})
    found = await samples(client)
    requests = "dsv4_proxy_http_requests_total"
    assert value(found, requests, endpoint="/v1/chat/completions", status="200") == 1
    assert value(found, requests, endpoint="/v1/chat/completions", status="400") == 1
    assert value(found, requests, endpoint="/v1/completions", status="429") == 1
    assert value(found, requests, endpoint="other", status="404") == 1
    assert value(found, "dsv4_proxy_tokens_total", kind="completion") == 3
    assert value(found, "dsv4_proxy_tokens_total", kind="cached") == 2
    assert value(found, "dsv4_proxy_generations_total", outcome="stop") == 1
    assert value(found, "dsv4_proxy_generations_total", outcome="error") == 1
    assert value(found, "dsv4_proxy_time_to_first_token_seconds_count") == 1
    assert value(found, "dsv4_proxy_output_interval_seconds_count") == 2


async def test_open_streams_and_disconnects(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    triton.script = endless
    writer = await send_raw(client, "/v1/chat/completions", {**CHAT, "stream": True})
    await until(lambda: bool(triton.requests) and triton.requests[0].sent > 2)
    found = await samples(client)
    assert value(found, "dsv4_proxy_open_streams") == 1
    assert value(found, "dsv4_proxy_http_requests_running", endpoint="/v1/chat/completions") == 1
    writer.close()
    await until(lambda: triton.requests[0].cancelled_at is not None)
    await asyncio.sleep(0.05)
    found = await samples(client)
    assert value(found, "dsv4_proxy_open_streams") == 0
    assert value(found, "dsv4_proxy_client_disconnects_total", endpoint="/v1/chat/completions") == 1
    assert value(found, "dsv4_proxy_generations_total", outcome="cancelled") == 1


async def test_engine_metrics_are_merged(start_proxy: StartProxy) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b"# TYPE dsv4_requests_waiting gauge\ndsv4_requests_waiting 7\n"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = await start_proxy(triton_metrics=f"http://127.0.0.1:{port}/metrics")
        found = await samples(client)
        assert value(found, "dsv4_requests_waiting") == 7
        assert value(found, "dsv4_proxy_triton_metrics_up") == 1
    server.close()
    assert value(await samples(client), "dsv4_proxy_triton_metrics_up") == 0


async def test_openapi_is_complete(start_proxy: StartProxy) -> None:
    client = await start_proxy(api_keys=("k",))
    document = (await client.get("/openapi.json", headers={"x-api-key": "k"})).json()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert {"200", "400", "401", "404", "413", "429", "503", "504"} <= set(chat["responses"])
    assert chat["security"]
    assert "text/event-stream" in chat["responses"]["200"]["content"]
    assert "application/json" in chat["responses"]["200"]["content"]
    schemas = document["components"]["schemas"]
    assert schemas["ChatCompletionRequest"]["required"] == ["messages"]
    assert schemas["ChatCompletionRequest"]["additionalProperties"] is False
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert "422" not in operation["responses"], (path, method)
            assert operation.get("summary"), (path, method)
