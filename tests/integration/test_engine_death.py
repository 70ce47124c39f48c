"""The engine process dies under streams: every client is told, and serving resumes by itself."""

from __future__ import annotations

import json
import time

import pytest
from tritonclient.utils import InferenceServerException

from tests.integration.grpc_client import GrpcStream
from tests.integration.server import Server, engine_process, wait_for

PROMPT = "Huawei is"


def test_every_stream_ends_and_serving_resumes(server: Server) -> None:
    before = server.generate(text_input=PROMPT, max_tokens=8).json()["text_output"]
    parameters = json.dumps({"max_tokens": 400, "ignore_eos": True})
    streams = [
        GrpcStream(server.grpc, "deepseek_v4", text_input=PROMPT, stream=True, sampling_parameters=parameters)
        for _ in range(6)
    ]
    for stream in streams:
        stream.next()
    victim = engine_process(server)
    killed = time.monotonic()
    victim.kill()
    for stream in streams:
        with pytest.raises(InferenceServerException, match=r"\[ENGINE_DEAD\]"):
            stream.read(timeout=10)
    assert time.monotonic() - killed < 5.0
    for stream in streams:
        stream.cancel()
    wait_for(server.is_ready, 60, interval=0.2)
    assert engine_process(server).pid != victim.pid
    assert server.generate(text_input=PROMPT, max_tokens=8).json()["text_output"] == before


def test_requests_while_the_engine_is_down_are_refused_at_once(server: Server) -> None:
    engine_process(server).kill()
    wait_for(lambda: not server.is_ready(), 5)
    started = time.monotonic()
    response = server.generate(text_input=PROMPT, max_tokens=2)
    assert response.status_code == 400
    assert response.json()["error"].startswith("[ENGINE_DEAD]")
    assert time.monotonic() - started < 5.0
    wait_for(server.is_ready, 60, interval=0.2)
    assert server.generate(text_input=PROMPT, max_tokens=2).status_code == 200
