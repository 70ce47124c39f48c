"""Wrong input to each entry: a coded error that names the field, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from dsv4.errors import ErrorCode, RequestError
from tritonclient.utils import InferenceServerException

from tests.integration.grpc_client import GrpcStream
from tests.integration.server import Server

USER = {"role": "user", "content": "What is 1+1?"}


def chat(**body: Any) -> str:
    return json.dumps(body)


TOO_LONG = "word " * 20_000

CASES = [
    pytest.param("deepseek_v4", {}, "text_input", id="no prompt"),
    pytest.param("deepseek_v4", {"text_input": "a", "input_ids": [1, 2]}, "text_input", id="both prompts"),
    pytest.param("deepseek_v4", {"input_ids": []}, "input_ids", id="empty ids"),
    pytest.param("deepseek_v4", {"input_ids": [-1, 2]}, "input_ids", id="negative id"),
    pytest.param("deepseek_v4", {"input_ids": [10_000_000, 2]}, "input_ids", id="id beyond the vocabulary"),
    pytest.param("deepseek_v4", {"text_input": TOO_LONG}, "max_model_len", id="prompt too long"),
    pytest.param(
        "deepseek_v4", {"text_input": "a", "sampling_parameters": '{"max_token": 3}'}, "max_token", id="unknown field"
    ),
    pytest.param("deepseek_v4", {"text_input": "a", "sampling_parameters": '{"top_k": "x"}'}, "top_k", id="wrong type"),
    pytest.param("deepseek_v4", {"text_input": "a", "sampling_parameters": "["}, "sampling_parameters", id="no JSON"),
    pytest.param("deepseek_v4", {"text_input": "a", "output_format": "{"}, "output_format", id="no JSON format"),
    pytest.param("deepseek_v4_chat", {}, "chat_request", id="ensemble without a request"),
    pytest.param("deepseek_v4_chat", {"chat_request": "["}, "chat_request", id="ensemble without JSON"),
    pytest.param("deepseek_v4_chat", {"chat_request": chat(messages=[])}, "messages", id="ensemble, no messages"),
    pytest.param(
        "deepseek_v4_chat", {"chat_request": chat(messages=[USER], max_token=1)}, "max_token", id="ensemble, unknown"
    ),
    pytest.param(
        "deepseek_v4_chat",
        {"chat_request": chat(messages=[{"role": "user", "content": TOO_LONG}])},
        "max_model_len",
        id="ensemble, prompt too long",
    ),
    pytest.param("deepseek_v4_encode", {}, "chat_request", id="encode without a request"),
    pytest.param("deepseek_v4_encode", {"chat_request": chat(messages=[])}, "messages", id="encode, no messages"),
    pytest.param(
        "deepseek_v4_encode",
        {"chat_request": chat(messages=[{"role": "wizard", "content": "x"}])},
        "messages[0].role",
        id="encode, unknown role",
    ),
    pytest.param(
        "deepseek_v4_encode",
        {"chat_request": chat(messages=[USER], temperature="hot")},
        "temperature",
        id="encode, type",
    ),
]


def check(text: str, field: str) -> None:
    error = RequestError.parse(text)
    assert error.code is ErrorCode.INVALID_ARGUMENT, text
    assert field in error.message
    assert "Traceback" not in text
    assert ".py" not in text


@pytest.mark.parametrize(("model", "fields", "field"), CASES)
def test_http(server: Server, model: str, fields: dict[str, Any], field: str) -> None:
    response = server.generate(model, **fields)
    assert response.status_code == 400, response.text
    check(response.json()["error"], field)


@pytest.mark.parametrize(("model", "fields", "field"), [case for case in CASES if "encode" not in case.values[0]])
def test_grpc(server: Server, model: str, fields: dict[str, Any], field: str) -> None:
    with GrpcStream(server.grpc, model, **fields) as stream, pytest.raises(InferenceServerException) as caught:
        stream.read()
    check(caught.value.message(), field)


def test_unknown_parameter_gets_a_hint(server: Server) -> None:
    for model, fields in (("deepseek_v4", {"text_input": "a"}), ("deepseek_v4_chat", {"chat_request": "{}"})):
        text = server.generate(model, **fields, max_token=5).json()["error"]
        assert "did you mean 'max_tokens'" in text


def test_wrong_tensor_types_are_refused_and_the_server_goes_on(server: Server) -> None:
    url = f"{server.http}/v2/models/deepseek_v4"
    for body in ({"text_input": 5}, {"text_input": "a", "stream": "yes"}, {"input_ids": ["a"]}):
        assert server.generate(**body).status_code in (400, 500)
    two_prompts = {"inputs": [{"name": "text_input", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}]}
    assert httpx.post(f"{url}/infer", json=two_prompts, trust_env=False).status_code in (400, 501)
    assert server.generate(text_input="Huawei is", max_tokens=2).status_code == 200
