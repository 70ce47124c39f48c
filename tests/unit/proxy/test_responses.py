"""OpenAI's responses API, checked on the wire; tests/e2e does it with the real client."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.unit.proxy.test_messages import THINKING_AND_CALL, named_events
from tests.unit.proxy.triton_double import Failure, Reply, TritonDouble, usage

PATH = "/v1/responses"


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name != "id"} for item in items]


ITEMS = [
    {
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "I need a tool"}],
    },
    {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}],
    },
    {
        "type": "function_call",
        "status": "completed",
        "call_id": "call_1",
        "name": "weather",
        "arguments": '{"city":"Rome"}',
    },
    {"type": "function_call", "status": "completed", "call_id": "call_2", "name": "time", "arguments": "{}"},
]


async def test_items_of_a_whole_answer(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    triton.script = lambda _: THINKING_AND_CALL
    response = (await client.post(PATH, json={"input": "Weather?", "metadata": {"a": "b"}})).json()
    assert response["status"] == "completed"
    assert without_ids(response["output"]) == ITEMS
    assert response["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 21,
    }
    assert response["metadata"] == {"a": "b"}
    assert response["temperature"] == 0


async def test_events_of_a_stream(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    triton.script = lambda _: THINKING_AND_CALL
    events = named_events((await client.post(PATH, json={"input": "Weather?", "stream": True})).text)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert [name for name, _ in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1][0] == "response.completed"
    assert without_ids(events[-1][1]["response"]["output"]) == ITEMS
    added = [data["item"] for name, data in events if name == "response.output_item.added"]
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert done == events[-1][1]["response"]["output"]
    text = "".join(data["delta"] for name, data in events if name == "response.output_text.delta")
    reasoning = "".join(data["delta"] for name, data in events if name == "response.reasoning_text.delta")
    arguments = "".join(data["delta"] for name, data in events if name == "response.function_call_arguments.delta")
    assert (text, reasoning, arguments) == ("Let me look.", "I need a tool", '{"city":"Rome"}{}')


async def test_cut_answer_is_incomplete(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    triton.script = lambda _: [Reply("a", {"content": "a"}, "length", usage(1, 1))]
    response = (await client.post(PATH, json={"input": "x", "max_output_tokens": 1})).json()
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    events = named_events((await client.post(PATH, json={"input": "x", "stream": True})).text)
    assert events[-1][0] == "response.incomplete"


async def test_input_items_become_chat_messages(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    body = {
        "instructions": "Be kind.",
        "input": [
            {"role": "user", "content": "Weather?"},
            *ITEMS,
            {"type": "function_call_output", "call_id": "call_1", "output": "sun"},
            {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "noon"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Well?"}]},
        ],
        "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}],
        "tool_choice": {"type": "function", "name": "weather"},
        "reasoning": {"effort": "high"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        "max_output_tokens": 9,
    }
    assert (await client.post(PATH, json=body)).status_code == 200
    (encoded,) = triton.encoded
    assert encoded["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "I need a tool",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}},
                {"id": "call_2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
        {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
        {"role": "user", "content": "Well?"},
    ]
    function = {"name": "weather", "parameters": {"type": "object"}, "strict": False}
    assert encoded["tools"] == [{"type": "function", "function": function}]
    assert encoded["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert (encoded["reasoning_effort"], encoded["max_tokens"]) == ("high", 9)
    assert encoded["response_format"]["json_schema"] == {"name": "n", "schema": {"type": "object"}, "strict": True}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ],
)
async def test_wrong_requests(
    client: httpx.AsyncClient, triton: TritonDouble, fields: dict[str, Any], param: str
) -> None:
    response = await client.post(PATH, json=fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert triton.requests == []


async def test_error_after_the_first_byte(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    triton.script = lambda _: [Reply("a", {"content": "a"}), Failure("[ENGINE_DEAD] gone")]
    name, data = named_events((await client.post(PATH, json={"input": "x", "stream": True})).text)[-1]
    assert (name, data["code"]) == ("error", "engine_dead")
