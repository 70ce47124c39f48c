"""The engine model and the chat ensemble through gRPC streaming and the HTTP generate endpoints."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import httpx
import numpy as np
import tritonclient.http as triton_http

from tests.integration.grpc_client import GrpcStream, text_of, token_ids_of
from tests.integration.server import Server

PROMPT = "Huawei is"
CHAT = json.dumps({"messages": [{"role": "user", "content": "What is 1+1?"}], "max_tokens": 24})
EVERYTHING = {
    "return_finish_reason": True,
    "return_cumulative_logprob": True,
    "return_logprobs": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_token_ids": True,
}


def sampling(**fields: Any) -> str:
    return json.dumps(fields)


def events_of(text: str) -> list[dict[str, Any]]:
    """The objects of a Server-Sent Events body."""
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def test_grpc_stream_of_the_engine(server: Server) -> None:
    with GrpcStream(
        server.grpc,
        "deepseek_v4",
        request_id="mine",
        text_input=PROMPT,
        stream=True,
        sampling_parameters=sampling(max_tokens=12, ignore_eos=True),
        **EVERYTHING,
    ) as stream:
        responses = stream.read()
    assert len(responses) > 1
    tokens = token_ids_of(responses)
    assert len(tokens) == 12
    assert sum(int(outputs["num_output_tokens"][0]) for outputs in responses) == 12
    assert [outputs["finish_reason"][0] for outputs in responses[:-1]] == [b"None"] * (len(responses) - 1)
    assert responses[-1]["finish_reason"][0] == b"length"
    usage = json.loads(responses[-1]["usage"][0])
    assert usage["completion_tokens"] == 12
    assert usage["prompt_tokens"] == int(responses[0]["num_input_tokens"][0])
    logprobs = [entry for outputs in responses for entry in json.loads(outputs["logprobs"][0])]
    assert [int(next(iter(entry))) for entry in logprobs] == tokens
    total = sum(next(iter(entry.values()))["logprob"] for entry in logprobs)
    assert abs(total - float(responses[-1]["cumulative_logprob"][0])) < 1e-3


def test_streamed_or_not_and_both_protocols_give_the_same(server: Server) -> None:
    parameters = sampling(max_tokens=16, ignore_eos=True)
    common = {"text_input": PROMPT, "sampling_parameters": parameters, "exclude_input_in_output": True}
    with GrpcStream(server.grpc, "deepseek_v4", stream=True, return_token_ids=True, **common) as stream:
        streamed = stream.read()
    with GrpcStream(server.grpc, "deepseek_v4", return_token_ids=True, **common) as stream:
        whole = stream.read()
    assert len(whole) == 1
    assert token_ids_of(whole) == token_ids_of(streamed)
    assert text_of(whole) == text_of(streamed)
    posted = server.generate(**common).json()
    assert posted["text_output"] == text_of(whole)
    url = f"{server.http}/v2/models/deepseek_v4/generate_stream"
    answer = httpx.post(url, json={**common, "stream": True}, timeout=60, trust_env=False)
    assert "".join(event["text_output"] for event in events_of(answer.text)) == text_of(whole)


def test_the_prompt_is_repeated_as_in_the_vllm_backend(server: Server) -> None:
    answer = server.generate(text_input=PROMPT, max_tokens=4).json()
    assert answer["text_output"].startswith(PROMPT)


def test_ensemble_gives_chat_deltas(server: Server) -> None:
    with GrpcStream(
        server.grpc, "deepseek_v4_chat", chat_request=CHAT, stream=True, return_finish_reason=True
    ) as stream:
        responses = stream.read()
    deltas = [json.loads(outputs["chat_delta"][0]) for outputs in responses if "chat_delta" in outputs]
    content = "".join(delta.get("content") or "" for delta in deltas)
    assert content
    assert responses[-1]["finish_reason"][0] in (b"stop", b"length")
    whole = server.generate("deepseek_v4_chat", chat_request=CHAT).json()
    assert json.loads(whole["chat_delta"])["content"] == content
    assert json.loads(whole["usage"])["prompt_tokens"] > 0


def test_encode_then_engine_is_the_ensemble(server: Server) -> None:
    encoded = server.generate("deepseek_v4_encode", chat_request=CHAT).json()
    answer = server.generate(
        input_ids=encoded["input_ids"],
        sampling_parameters=encoded["sampling_parameters"],
        output_format=encoded["output_format"],
        return_token_ids=True,
    ).json()
    ensemble = server.generate("deepseek_v4_chat", chat_request=CHAT, return_token_ids=True).json()
    assert answer["token_ids"] == ensemble["token_ids"]
    assert answer["chat_delta"] == ensemble["chat_delta"]


def test_tritonclient_http(server: Server) -> None:
    """The HTTP client of Triton has no call for `generate`: it reads the models' contract and runs the encode step."""
    client = triton_http.InferenceServerClient(server.http.removeprefix("http://"))
    contract = client.get_model_metadata("deepseek_v4")
    assert {"text_input", "input_ids", "stream", "sampling_parameters"} <= {
        entry["name"] for entry in contract["inputs"]
    }
    request = triton_http.InferInput("chat_request", [1], "BYTES")
    request.set_data_from_numpy(np.array([CHAT.encode()], dtype=np.object_))
    result = client.infer("deepseek_v4_encode", [request])
    encoded = server.generate("deepseek_v4_encode", chat_request=CHAT).json()
    assert result.as_numpy("input_ids").tolist() == encoded["input_ids"]
    client.close()


def test_curl_on_both_endpoints(server: Server) -> None:
    curl = shutil.which("curl")
    assert curl, "curl is needed"
    body = json.dumps({"text_input": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True})
    url = f"{server.http}/v2/models/deepseek_v4/generate"
    command = [curl, "-sN", "--noproxy", "*", "--max-time", "60", "-d"]
    whole = subprocess.run([*command, body, url], capture_output=True, text=True, check=True).stdout
    text = json.loads(whole)["text_output"].removeprefix(PROMPT)
    streaming = json.dumps({**json.loads(body), "stream": True})
    events = subprocess.run([*command, streaming, f"{url}_stream"], capture_output=True, text=True, check=True).stdout
    assert "".join(event["text_output"] for event in events_of(events)) == text


def test_control_requests(server: Server) -> None:
    health = server.control("health")
    assert health["ready"] is True
    assert health["draining"] is False
    assert server.control("abort", abort_request_id="nobody") == {"aborted": 0}
    with GrpcStream(server.grpc, "deepseek_v4", parameters={"control": "health"}) as stream:
        [answer] = stream.read()
    assert json.loads(answer["text_output"][0])["ready"] is True
