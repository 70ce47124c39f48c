from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import httpx
import pytest
from dsv4.errors import ConfigurationError
from dsv4_clients.proxy.middleware.request_log import ACCESS_LOGGER
from dsv4_clients.proxy.settings import ProxySettings, read_settings

from tests.unit.proxy.conftest import StartProxy, until
from tests.unit.proxy.test_disconnect import CHAT, endless, never, send_raw
from tests.unit.proxy.triton_double import Failure, TritonDouble


async def test_health_tells_the_engine_state(start_proxy: StartProxy, triton: TritonDouble) -> None:
    client = await start_proxy()
    health = await client.get("/health")
    assert health.status_code == 200
    assert health.json() == {"status": "ok", "ready": True, "engine": triton.health}
    assert (await client.get("/health/ready")).status_code == 200


@pytest.mark.parametrize(
    ("health", "failure", "words"),
    [
        ({"ready": False, "state": "restarting"}, None, "restarting"),
        ({"ready": True}, Failure("Stub process 'x' is not healthy."), "died"),
    ],
)
async def test_not_ready(
    client: httpx.AsyncClient, triton: TritonDouble, health: dict[str, object], failure: Failure | None, words: str
) -> None:
    triton.health, triton.health_failure = health, failure
    ready = await client.get("/health/ready")
    assert ready.status_code == 503
    assert words in ready.json()["error"]["message"]
    alive = await client.get("/health")
    assert (alive.status_code, alive.json()["ready"]) == (200, False)


async def test_unreachable_triton_is_alive_but_not_ready(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    await triton.stop()
    assert (await client.get("/health/ready")).status_code == 503
    assert (await client.get("/health")).json()["ready"] is False


async def test_models(start_proxy: StartProxy) -> None:
    client = await start_proxy(served_model_names=("dsv4", "other/name"))
    await client.get("/health")
    cards = (await client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in cards] == ["dsv4", "other/name"]
    assert cards[0]["max_model_len"] == 512
    assert (await client.get("/v1/models/dsv4")).json()["id"] == "dsv4"
    assert (await client.get("/v1/models/other/name")).json()["id"] == "other/name"
    assert (await client.get("/v1/models/none")).status_code == 404
    assert (await client.get("/version")).json()["version"]


async def test_profiling(client: httpx.AsyncClient) -> None:
    assert (await client.post("/start_profile")).json() == {"profiling": True}
    assert (await client.post("/stop_profile")).json() == {"profiling": False}


async def test_unknown_path_and_method_have_openai_errors(client: httpx.AsyncClient) -> None:
    missing = await client.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = await client.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_api_keys(start_proxy: StartProxy) -> None:
    client = await start_proxy(api_keys=("first", "sécond"))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first"}, {"x-api-key": "x"}):
        refused = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert (await client.get("/v1/models")).status_code == 401
    assert (await client.get("/metrics")).status_code == 401
    assert (await client.get("/health")).status_code == 200
    for headers in (
        {"Authorization": "Bearer first"},
        {"x-api-key": "first"},
        {"Authorization": "bearer sécond".encode()},
    ):
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200


async def test_body_limit(start_proxy: StartProxy) -> None:
    client = await start_proxy(max_body_bytes=1000)
    large = {"prompt": "x" * 2000}
    assert (await client.post("/v1/completions", json=large)).status_code == 413

    async def chunked() -> object:
        for _ in range(20):
            yield b"x" * 100

    response = await client.post("/v1/completions", content=chunked())
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_slow_body_is_408(start_proxy: StartProxy) -> None:
    client = await start_proxy(body_timeout_seconds=0.1)
    writer = await send_raw(client, "/v1/completions", {"prompt": "x"})
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    reader = writer.reader  # type: ignore[attr-defined]
    received = b""
    while b"408" not in received:
        part = await reader.read(65536)
        assert part
        received += part
    writer.close()


async def test_concurrency_limit(start_proxy: StartProxy, triton: TritonDouble) -> None:
    client = await start_proxy(max_concurrent_requests=2)
    triton.script = never
    writers = [await send_raw(client, "/v1/completions", {"prompt": "x", "stream": True}) for _ in range(2)]
    await until(lambda: len(triton.requests) == 2)
    refused = await client.post("/v1/chat/completions", json=CHAT)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert (await client.get("/health")).status_code == 200
    writers[0].close()
    await until(lambda: any(request.cancelled_at for request in triton.requests))
    triton.script = endless
    accepted = await send_raw(client, "/v1/chat/completions", CHAT)
    await until(lambda: len(triton.requests) == 3)
    for writer in (accepted, writers[1]):
        writer.close()


async def test_concurrency_limit_per_key(start_proxy: StartProxy, triton: TritonDouble) -> None:
    client = await start_proxy(max_concurrent_requests_per_key=1, api_keys=("a", "b"))
    triton.script = never

    def complete(key: str) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}, headers={"x-api-key": key}))

    held = complete("a")
    await until(lambda: len(triton.requests) == 1)
    assert (await complete("a")).status_code == 429
    other = complete("b")
    await until(lambda: len(triton.requests) == 2)
    for task in (held, other):
        task.cancel()
    await asyncio.gather(held, other, return_exceptions=True)


async def test_trusted_hosts_and_cors(start_proxy: StartProxy) -> None:
    client = await start_proxy(trusted_hosts=("127.0.0.1",), allowed_origins=("https://app.example",))
    assert (await client.get("/version", headers={"Host": "evil.example"})).status_code == 400
    allowed = await client.get("/version", headers={"Origin": "https://app.example"})
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    other = await client.get("/version", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


async def test_cors_is_off_by_default(client: httpx.AsyncClient) -> None:
    response = await client.get("/version", headers={"Origin": "https://app.example"})
    assert "access-control-allow-origin" not in response.headers


async def test_access_log_is_json_without_content(start_proxy: StartProxy, caplog: pytest.LogCaptureFixture) -> None:
    client = await start_proxy(access_log=True)
    with caplog.at_level(logging.INFO, ACCESS_LOGGER):
        body = {"messages": [{"role": "user", "content": "secret words"}]}
        await client.post("/v1/chat/completions?token=secret", json=body, headers={"x-request-id": "r1"})
        await client.post("/v1/completions", json={"prompt": 5, "secret": 1})
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == ACCESS_LOGGER]
    assert [(line["path"], line["status"]) for line in lines] == [
        ("/v1/chat/completions", 200),
        ("/v1/completions", 400),
    ]
    assert lines[0]["request_id"] == "r1"
    assert "secret" not in caplog.text


def test_settings_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# team\nalpha\n\nbeta\n")
    monkeypatch.setenv("DSV4_API_KEYS", "gamma, alpha")
    settings = read_settings(
        [
            *("--port", "9", "--served-model-name", "a", "b", "--generate-config", '{"max_new_tokens": 5}'),
            *("--api-key-file", str(keys), "--triton", "h:1", "--triton-metrics", ""),
        ]
    )
    assert settings.served_model_names == ("a", "b")
    assert settings.generate_config == {"max_tokens": 5}
    assert settings.api_keys == ("alpha", "beta", "gamma")
    assert settings.triton_metrics is None
    monkeypatch.delenv("DSV4_API_KEYS")
    assert read_settings([]) == ProxySettings()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--generate-config", "{"],
        ["--generate-config", "[]"],
        ["--generate-config", '{"temprature": 1}'],
        ["--api-key-file", "/nonexistent"],
    ],
)
def test_wrong_settings_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=arguments[0]):
        read_settings(arguments)
