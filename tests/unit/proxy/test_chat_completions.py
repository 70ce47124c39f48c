from __future__ import annotations

import json
from typing import Any

import grpc
import httpx
import pytest

from tests.unit.proxy.conftest import StartProxy
from tests.unit.proxy.triton_double import EngineRequest, Failure, Reply, TritonDouble, usage

PATH = "/v1/chat/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "What is 1+1?"}], **fields}


def events_of(text: str) -> list[Any]:
    """The payloads of an event stream; the last one must be [DONE]."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


async def test_answers_a_chat(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    response = await client.post(PATH, json=chat(max_tokens=32))
    assert response.status_code == 200
    answer = response.json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "deepseek_v4"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello world", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    (request,) = triton.requests
    assert request.inputs["input_ids"] == [0, 1, 2, 3, 4]
    assert request.inputs["stream"] is False
    assert request.inputs["sampling_parameters"] == {"max_tokens": 32}
    assert request.metadata["triton_grpc_error"] == "true"


async def test_encode_gets_the_messages_as_they_were_sent(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"parameters": schema, "name": "f"}}]
    messages = [{"role": "user", "name": "x", "content": [{"type": "text", "text": "grüß 😀"}]}]
    body = {"messages": messages, "tools": tools, "reasoning_effort": "high", "user": "someone", "n": 1}
    assert (await client.post(PATH, json=body)).status_code == 200
    (encoded,) = triton.encoded
    assert encoded == {"messages": messages, "tools": tools, "reasoning_effort": "high"}
    assert list(encoded["tools"][0]["function"]) == ["parameters", "name"]
    assert list(encoded["tools"][0]["function"]["parameters"]["properties"]) == ["b", "a"]


async def test_streams_a_chat(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    response = await client.post(PATH, json=chat(stream=True))
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events_of(response.text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Hello"}, {"content": " world"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert triton.requests[0].inputs["stream"] is True


async def test_usage_chunk_comes_last_when_asked_for(client: httpx.AsyncClient) -> None:
    response = await client.post(PATH, json=chat(stream=True, stream_options={"include_usage": True}))
    chunks = events_of(response.text)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 8
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_continuous_usage_grows_with_the_tokens(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events_of((await client.post(PATH, json=chat(stream=True, stream_options=options))).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 3]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {5}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_reasoning_has_both_names(client: httpx.AsyncClient, triton: TritonDouble, name: str) -> None:
    triton.script = lambda request: [
        Reply("", {name: "Let me "}),
        Reply("", {name: "think", "content": "2"}),
        Reply("", finish_reason="length", usage=usage(5, 4, reasoning_tokens=3)),
    ]
    message = (await client.post(PATH, json=chat())).json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Let me think"
    assert message["content"] == "2"
    answer = (await client.post(PATH, json=chat())).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    chunks = events_of((await client.post(PATH, json=chat(stream=True))).text)
    assert chunks[1]["choices"][0]["delta"] == {"reasoning_content": "Let me ", "reasoning": "Let me "}
    hidden = (await client.post(PATH, json=chat(include_reasoning=False))).json()["choices"][0]["message"]
    assert hidden == {"role": "assistant", "content": "2", "refusal": None}


async def test_tool_calls_are_joined_by_index(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    triton.script = lambda request: [
        Reply("", {"tool_calls": [first]}),
        Reply("", {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]}),
        Reply("", {"tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}]}),
        Reply("", finish_reason="tool_calls", usage=usage(5, 4)),
    ]
    choice = (await client.post(PATH, json=chat())).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }


async def test_logprobs_are_shaped_as_openai_does(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    entry = {"token_id": 7, "token": "é", "logprob": -0.5, "top": [[7, "é", -0.5], [8, "e", -1.5], [9, "x", -3.0]]}
    triton.script = lambda request: [Reply("é", {"content": "é"}, "stop", usage(5, 1), logprobs=[entry])]
    choice = (await client.post(PATH, json=chat(logprobs=True, top_logprobs=2))).json()["choices"][0]
    assert choice["logprobs"]["content"] == [
        {
            "token": "é",
            "logprob": -0.5,
            "bytes": [195, 169],
            "top_logprobs": [
                {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
                {"token": "e", "logprob": -1.5, "bytes": [101]},
            ],
        }
    ]
    assert (triton.encoded[0]["logprobs"], triton.encoded[0]["top_logprobs"]) == (True, 2)
    assert triton.requests[0].inputs["return_logprobs"] is True


async def test_several_choices_have_own_seeds_and_one_prompt_count(
    client: httpx.AsyncClient, triton: TritonDouble
) -> None:
    def script(request: EngineRequest) -> list[Reply]:
        text = str(request.inputs["sampling_parameters"]["seed"])
        return [Reply(text, {"content": text}, "stop", usage(5, 2))]

    triton.script = script
    answer = (await client.post(PATH, json=chat(n=3, temperature=1, seed=10))).json()
    contents = {choice["index"]: choice["message"]["content"] for choice in answer["choices"]}
    assert contents == {0: "10", 1: "11", 2: "12"}
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 6
    assert len({request.request_id for request in triton.requests}) == 3
    chunks = events_of((await client.post(PATH, json=chat(n=3, temperature=1, seed=10, stream=True))).text)
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1, 2}


async def test_greedy_copies_are_refused(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    response = await client.post(PATH, json=chat(n=2))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"
    assert triton.requests == []


async def test_server_defaults_apply_until_set_or_cleared(start_proxy: StartProxy, triton: TritonDouble) -> None:
    client = await start_proxy(generate_config={"temperature": 0.6, "max_tokens": 7})
    for fields in ({}, {"temperature": 0.1}, {"temperature": None, "max_completion_tokens": 9}):
        assert (await client.post(PATH, json=chat(**fields))).status_code == 200
    sampling = [request.inputs["sampling_parameters"] for request in triton.requests]
    assert sampling == [
        {"temperature": 0.6, "max_tokens": 7},
        {"temperature": 0.1, "max_tokens": 7},
        {"max_tokens": 9},
    ]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_token": 3}, "max_token", "did you mean 'max_tokens'"),
        ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag", "include_usage"),
        ({"functions": []}, "functions", "use tools"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "'user'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
        ({"stop": 5}, "stop", "string"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"stream_options": {}}, "stream_options", "stream"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex", "one"),
    ],
)
async def test_wrong_fields_are_named(
    client: httpx.AsyncClient, triton: TritonDouble, fields: dict[str, Any], param: str, words: str
) -> None:
    response = await client.post(PATH, json=chat(**fields))
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(param)
    assert words in error["message"]
    assert triton.requests == []


async def test_missing_messages_and_broken_json(client: httpx.AsyncClient) -> None:
    missing = await client.post(PATH, json={"max_tokens": 3})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "messages")
    broken = await client.post(PATH, content=b"{", headers={"Content-Type": "application/json"})
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    untyped = await client.post(PATH, content=b"messages", headers={"Content-Type": "text/plain"})
    assert (untyped.status_code, untyped.json()["error"]["code"]) == (400, "invalid_json")


async def test_unpaired_surrogates_reach_the_encode_step_and_are_refused_in_prompts(
    client: httpx.AsyncClient, triton: TritonDouble
) -> None:
    headers = {"Content-Type": "application/json"}
    body = rb'{"messages": [{"role": "user", "content": "\ud800"}]}'
    assert (await client.post(PATH, content=body, headers=headers)).status_code == 200
    assert triton.encoded[0]["messages"][0]["content"] == "\ud800"
    response = await client.post("/v1/completions", content=rb'{"prompt": ["a", "\ud800"]}', headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt[1]")


async def test_unknown_model_is_404_and_aliases_work(start_proxy: StartProxy, triton: TritonDouble) -> None:
    client = await start_proxy(served_model_names=("dsv4", "alias"))
    unknown = await client.post(PATH, json=chat(model="gpt-4"))
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"
    known = await client.post(PATH, json=chat(model="alias"))
    assert (known.status_code, known.json()["model"]) == (200, "alias")


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (Failure("[QUEUE_FULL] 512 requests wait", grpc.StatusCode.UNAVAILABLE), 429, "queue_full"),
        (Failure("[DEADLINE] 3 s passed", grpc.StatusCode.INTERNAL), 504, "deadline"),
        (Failure("[ENGINE_DEAD] it stopped", grpc.StatusCode.INTERNAL), 503, "engine_dead"),
        (Failure("[DEVICE_ERROR 507015] aicore", grpc.StatusCode.INTERNAL), 503, "device_error"),
        (Failure("[DRAINING] stopping", grpc.StatusCode.UNAVAILABLE), 503, "draining"),
        (Failure("[ABORTED] aborted", grpc.StatusCode.CANCELLED), 499, "aborted"),
        (Failure("[INVALID_ARGUMENT] max_tokens: too large"), 400, "invalid_argument"),
        (Failure("[UNSUPPORTED] structured_outputs: no"), 400, "unsupported"),
        (Failure("Traceback: File /opt/secret.py", grpc.StatusCode.INTERNAL), 500, "internal"),
        (Failure("Stub process 'e_0_0' is not healthy.", grpc.StatusCode.INTERNAL), 503, "engine_dead"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_engine_errors_before_the_first_byte_are_statuses(
    client: httpx.AsyncClient, triton: TritonDouble, failure: Failure, status: int, code: str, stream: bool
) -> None:
    triton.script = lambda request: [failure]
    response = await client.post(PATH, json=chat(stream=stream))
    assert response.status_code == status
    error = response.json()["error"]
    assert error["code"] == code
    assert "secret" not in error["message"]
    assert ("retry-after" in response.headers) == (status in (429, 503))
    if "max_tokens" in failure.message:
        assert error["param"] == "max_tokens"


async def test_encode_errors_name_the_field(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    triton.encode_failure = Failure("[INVALID_ARGUMENT] messages[0].content: must not be null")
    response = await client.post(PATH, json=chat(stream=True))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content"
    assert triton.requests == []


async def test_error_after_the_first_byte_is_an_event(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    triton.script = lambda request: [
        Reply("Hel", {"content": "Hel"}),
        Failure("[ENGINE_DEAD] the engine died", grpc.StatusCode.UNAVAILABLE, after=0.05),
    ]
    response = await client.post(PATH, json=chat(stream=True))
    assert response.status_code == 200
    events = events_of(response.text)
    assert events[1]["choices"][0]["delta"] == {"content": "Hel"}
    assert events[-1]["error"]["code"] == "engine_dead"


async def test_stream_without_a_finish_reason_is_an_error(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    triton.script = lambda request: [Reply("Hel", {"content": "Hel"})]
    response = await client.post(PATH, json=chat())
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")


async def test_unreachable_triton_is_503(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    await triton.stop()
    for path, body in ((PATH, chat()), ("/v1/completions", {"prompt": "x"})):
        response = await client.post(path, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")


async def test_silent_stream_gets_comments_and_then_its_error(start_proxy: StartProxy, triton: TritonDouble) -> None:
    client = await start_proxy(keep_alive_seconds=0.05)
    triton.script = lambda request: [Failure("[DEADLINE] too late", grpc.StatusCode.INTERNAL, after=0.2)]
    response = await client.post(PATH, json=chat(stream=True))
    assert response.status_code == 200
    assert response.text.startswith(": keep-alive\n\n")
    (event,) = events_of(response.text)
    assert event["error"]["code"] == "deadline"


async def test_request_timeout_travels_to_the_engine(start_proxy: StartProxy, triton: TritonDouble) -> None:
    client = await start_proxy(request_timeout_seconds=2.5)
    await client.post(PATH, json=chat())
    assert triton.requests[0].parameters["timeout"] == 2_500_000


async def test_prompt_limit(start_proxy: StartProxy, triton: TritonDouble) -> None:
    client = await start_proxy(max_prompt_tokens=4)
    response = await client.post(PATH, json=chat())
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    assert triton.requests == []


async def test_trace_context_and_request_id_pass_through(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    response = await client.post(PATH, json=chat(), headers={"traceparent": trace, "x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert triton.requests[0].metadata["traceparent"] == trace
    assert (await client.post(PATH, json=chat())).headers["x-request-id"]
    bad = await client.post(PATH, json=chat(), headers={"x-request-id": "a b\tc"})
    assert bad.headers["x-request-id"] != "a b\tc"


async def test_token_ids_are_returned_when_asked_for(client: httpx.AsyncClient) -> None:
    answer = (await client.post(PATH, json=chat(return_token_ids=True))).json()
    assert answer["prompt_token_ids"] == [0, 1, 2, 3, 4]
    assert answer["choices"][0]["token_ids"] == [1, 2, 3]
