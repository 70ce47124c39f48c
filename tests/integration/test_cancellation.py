"""A request that nobody wants any more is gone from the engine within a second, whatever it was doing."""

from __future__ import annotations

import concurrent.futures
import json
import time

import httpx
import pytest
from tritonclient.utils import InferenceServerException

from tests.integration.grpc_client import GrpcStream, text_of
from tests.integration.server import Server, wait_for

LONG = json.dumps({"max_tokens": 400, "ignore_eos": True})
PROMPT = "Huawei is"


def active(server: Server) -> int:
    """Requests that the engine knows."""
    stats = server.stats()
    return int(stats["running"]) + int(stats["waiting"])


def start_long(server: Server, **changes: object) -> GrpcStream:
    inputs = {"text_input": PROMPT, "stream": True, "sampling_parameters": LONG, **changes}
    return GrpcStream(server.grpc, str(inputs.pop("model", "deepseek_v4")), **inputs)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _idle(server: Server) -> None:
    wait_for(lambda: active(server) == 0, 30)


def test_closed_grpc_stream(server: Server) -> None:
    stream = start_long(server)
    stream.next()
    assert active(server) == 1
    stream.cancel()
    assert wait_for(lambda: active(server) == 0, 5) < 1.0


def test_closed_grpc_stream_before_the_first_token(server: Server) -> None:
    stream = start_long(server, text_input="word " * 150)
    stream.cancel()
    time.sleep(0.1)
    assert wait_for(lambda: active(server) == 0, 5) < 1.0


def test_not_streamed_request(server: Server) -> None:
    stream = start_long(server, stream=False)
    wait_for(lambda: active(server) == 1, 10)
    stream.cancel()
    assert wait_for(lambda: active(server) == 0, 5) < 1.0


def test_closed_http_stream(server: Server) -> None:
    url = f"{server.http}/v2/models/deepseek_v4/generate_stream"
    body = {"text_input": PROMPT, "stream": True, "sampling_parameters": LONG}
    with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as response:
        lines = response.iter_lines()  # kept: its end would close the response
        next(lines)
        assert active(server) == 1
    assert wait_for(lambda: active(server) == 0, 5) < 1.0


@pytest.mark.parametrize("model", ["deepseek_v4", "deepseek_v4_chat"])
def test_abort_by_id(server: Server, model: str) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 300, "ignore_eos": True}
    prompt = {"chat_request": json.dumps(body)} if model.endswith("chat") else {"text_input": PROMPT}
    sampling = {} if model.endswith("chat") else {"sampling_parameters": LONG}
    with GrpcStream(server.grpc, model, request_id=f"to-abort-{model}", stream=True, **prompt, **sampling) as stream:
        stream.next()
        assert server.control("abort", abort_request_id=f"to-abort-{model}") == {"aborted": 1}
        with pytest.raises(InferenceServerException, match=r"\[ABORTED\]"):
            stream.read()
        assert wait_for(lambda: active(server) == 0, 5) < 1.0


def test_deadline(server: Server) -> None:
    with (
        start_long(server, parameters={"timeout_ms": 300}) as stream,
        pytest.raises(InferenceServerException, match=r"\[DEADLINE\]"),
    ):
        stream.read()
    with (
        start_long(server, timeout_microseconds=300_000) as stream,
        pytest.raises(InferenceServerException, match=r"\[DEADLINE\]"),
    ):
        stream.read()
    assert wait_for(lambda: active(server) == 0, 5) < 1.0


def test_one_of_ten_clients_leaves(server: Server) -> None:
    parameters = json.dumps({"max_tokens": 48, "ignore_eos": True})
    streams = [start_long(server, sampling_parameters=parameters) for _ in range(9)]
    leaving = start_long(server)
    leaving.next()
    leaving.cancel()
    assert wait_for(lambda: active(server) <= 9, 5) < 1.0
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        texts = list(pool.map(lambda stream: text_of(stream.read()), streams))
    assert len(set(texts)) == 1
    assert texts[0]
    for stream in streams:
        stream.cancel()


def test_cancel_storm_leaves_nothing(server: Server) -> None:
    for number in range(60):
        stream = start_long(server)
        if number % 3 == 0:
            stream.next()
        stream.cancel()
    assert wait_for(lambda: active(server) == 0, 10) < 10.0
    assert server.generate(text_input=PROMPT, max_tokens=2).status_code == 200
