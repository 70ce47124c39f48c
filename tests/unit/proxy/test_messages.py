"""Anthropic's messages API, checked on the wire; tests/e2e does it with the real client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.unit.proxy.triton_double import Failure, Reply, TritonDouble, usage

PATH = "/v1/messages"


def request(**fields: Any) -> dict[str, Any]:
    return {"max_tokens": 50, "messages": [{"role": "user", "content": "Weather?"}], **fields}


def named_events(text: str) -> list[tuple[str, dict[str, Any]]]:
    events = []
    for block in text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in events)
    return events


THINKING_AND_CALL = [
    Reply("", {"reasoning_content": "I need "}),
    Reply("", {"reasoning_content": "a tool", "content": "Let me look."}),
    Reply("", {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": ""}}]}),
    Reply("", {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]}),
    Reply("", {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]}),
    Reply("", {"tool_calls": [{"index": 1, "id": "call_2", "function": {"name": "time", "arguments": "{}"}}]}),
    Reply("", finish_reason="tool_calls", usage=usage(9, 12, cached_tokens=4, reasoning_tokens=3)),
]
BLOCKS = [
    {"type": "thinking", "thinking": "I need a tool", "signature": ""},
    {"type": "text", "text": "Let me look."},
    {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}},
    {"type": "tool_use", "id": "call_2", "name": "time", "input": {}},
]


async def test_blocks_of_a_whole_answer(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    triton.script = lambda _: THINKING_AND_CALL
    message = (await client.post(PATH, json=request())).json()
    assert message["content"] == BLOCKS
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"] == {
        "input_tokens": 5,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "output_tokens": 12,
    }


async def test_blocks_of_a_stream(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    triton.script = lambda _: THINKING_AND_CALL
    events = named_events((await client.post(PATH, json=request(stream=True))).text)
    assert events[0][0] == "message_start"
    assert [name for name, _ in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == 12
    blocks: list[dict[str, Any]] = []
    open_index = None
    for name, data in events[1:-2]:
        if name == "content_block_start":
            assert (open_index, data["index"]) == (None, len(blocks))
            open_index = data["index"]
            blocks.append({**data["content_block"], "json": ""})
        elif name == "content_block_delta":
            assert data["index"] == open_index
            delta = data["delta"]
            for field, key in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                if field in delta:
                    blocks[-1][key] += delta[field]
        else:
            assert (name, data["index"]) == ("content_block_stop", open_index)
            open_index = None
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    assert blocks == BLOCKS


async def test_history_becomes_chat_messages(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    body = request(
        system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {"role": "assistant", "content": BLOCKS},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "sun"}]},
                    {"type": "tool_result", "tool_use_id": "call_2", "content": "noon"},
                    {"type": "text", "text": "Well?"},
                ],
            },
        ],
        tools=[{"name": "weather", "description": "d", "input_schema": {"type": "object"}}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        stop_sequences=["END"],
    )
    assert (await client.post(PATH, json=body)).status_code == 200
    (encoded,) = triton.encoded
    assert encoded["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "I need a tool",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
                {"id": "call_2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sun"}]},
        {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
        {"role": "user", "content": "Well?"},
    ]
    function = {"name": "weather", "description": "d", "parameters": {"type": "object"}}
    assert encoded["tools"] == [{"type": "function", "function": function}]
    assert (encoded["tool_choice"], encoded["parallel_tool_calls"]) == ("required", False)
    assert encoded["thinking"] == {"type": "enabled"}
    assert (encoded["stop"], encoded["max_tokens"]) == (["END"], 50)


async def test_stop_sequence_is_told(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    counts: dict[str, Any] = {**usage(1, 1), "stop_reason": "END"}
    triton.script = lambda _: [Reply("a", {"content": "a"}, "stop", counts)]
    message = (await client.post(PATH, json=request())).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


async def test_count_tokens(client: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert (await client.post(f"{PATH}/count_tokens", json=body)).json() == {"input_tokens": 5}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_token": 1}, "did you mean 'max_tokens'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"tools": [{"name": "x", "type": "bash_20250124", "input_schema": {}}]}, "tools[0].type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 5}]}]},
            "messages[0].tool_call_id",
        ),
    ],
)
async def test_wrong_requests(
    client: httpx.AsyncClient, triton: TritonDouble, fields: dict[str, Any], words: str
) -> None:
    response = await client.post(PATH, json=request(**fields))
    assert response.status_code == 400
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert words in error["error"]["message"]
    assert triton.requests == []


async def test_errors_before_and_after_the_first_byte(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    triton.script = lambda _: [Failure("[QUEUE_FULL] full")]
    refused = await client.post(PATH, json=request(stream=True))
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    triton.script = lambda _: [Reply("a", {"content": "a"}), Failure("[ENGINE_DEAD] gone")]
    name, data = named_events((await client.post(PATH, json=request(stream=True))).text)[-1]
    assert (name, data["error"]["type"]) == ("error", "overloaded_error")
