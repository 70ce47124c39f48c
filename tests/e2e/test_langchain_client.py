"""The langchain-openai package against the whole stack: the documentation's tool round trip."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.integration.server import Server


@tool
def get_weather(location: str) -> str:
    """Get the current weather in a given location"""
    return f'{{"location": "{location}", "temperature": 7, "condition": "light rain"}}'


def ask(chat: Any, messages: list[Any], *, stream: bool) -> AIMessage:
    if not stream:
        return chat.invoke(messages)
    whole: AIMessageChunk | None = None
    for chunk in chat.stream(messages):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return whole


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
def test_tool_round_trip(server: Server, model: str, thinking: bool, stream: bool) -> None:
    chat = ChatOpenAI(
        base_url=f"{server.api}/v1",
        api_key="none",
        model=model,
        max_retries=0,
        timeout=60,
        extra_body={"max_tokens": 200, "chat_template_kwargs": {"enable_thinking": thinking}},
    ).bind_tools([get_weather])
    messages: list[Any] = [HumanMessage("What is the weather in Hangzhou?")]
    call = ask(chat, messages, stream=stream)
    assert [(each["name"], each["args"]) for each in call.tool_calls] == [("get_weather", {"location": "Hangzhou"})]
    messages += [
        call,
        ToolMessage(get_weather.invoke(call.tool_calls[0]["args"]), tool_call_id=call.tool_calls[0]["id"]),
    ]
    answer = ask(chat, messages, stream=stream)
    assert not answer.tool_calls
    assert "light rain" in answer.content
    assert "7" in answer.content
