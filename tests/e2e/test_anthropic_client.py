"""The anthropic package against the whole stack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.server import Server

anthropic = pytest.importorskip("anthropic")

QUESTION: list[Any] = [{"role": "user", "content": "What is 1+1?"}]


@pytest.fixture(scope="module")
def anthropic_client(server: Server) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.api, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_message_and_stream(anthropic_client: Any, model: str) -> None:
    message = anthropic_client.messages.create(model=model, max_tokens=64, messages=QUESTION)
    (block,) = message.content
    assert "2" in block.text
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 0
    with anthropic_client.messages.stream(model=model, max_tokens=64, messages=QUESTION) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text
    assert final.usage.output_tokens == message.usage.output_tokens
    counted = anthropic_client.messages.count_tokens(model=model, messages=QUESTION)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_thinking_and_tools(anthropic_client: Any, model: str) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    message = anthropic_client.messages.create(model=model, max_tokens=128, messages=QUESTION, thinking=thinking)
    assert [block.type for block in message.content] == ["thinking", "text"]
    tool = {
        "name": "get_weather",
        "description": "Get the current weather in a given location",
        "input_schema": {
            "type": "object",
            "properties": {"location": {"type": "string", "description": "The city name"}},
            "required": ["location"],
        },
    }
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Hangzhou?"}]
    called = anthropic_client.messages.create(model=model, max_tokens=128, messages=messages, tools=[tool])
    assert called.stop_reason == "tool_use"
    (use,) = [block for block in called.content if block.type == "tool_use"]
    assert use.input == {"location": "Hangzhou"}
    messages.append({"role": "assistant", "content": [block.model_dump(mode="json") for block in called.content]})
    result = {
        "type": "tool_result",
        "tool_use_id": use.id,
        "content": '{"location": "Hangzhou", "temperature": 7, "condition": "light rain"}',
    }
    messages.append({"role": "user", "content": [result]})
    final = anthropic_client.messages.create(model=model, max_tokens=128, messages=messages, tools=[tool])
    assert final.stop_reason == "end_turn"
    assert "light rain" in final.content[-1].text


def test_mistakes(anthropic_client: Any, model: str) -> None:
    with pytest.raises(anthropic.BadRequestError):
        anthropic_client.messages.create(model=model, max_tokens=1, messages=[])
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.messages.create(model="claude", max_tokens=1, messages=QUESTION)
