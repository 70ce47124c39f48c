"""The openai package against the whole stack: proxy, tritonserver, engine, trained small model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from tests.integration.server import Server, wait_for

QUESTION: list[Any] = [{"role": "user", "content": "What is 1+1?"}]
WEATHER_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a given location",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "description": "The city name"}},
            "required": ["location"],
        },
    },
}


def test_chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=32)
    choice = answer.choices[0]
    assert "2" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert answer.model == model
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens > 3


def test_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI, model: str) -> None:
    arguments: Any = {"model": model, "messages": QUESTION, "max_tokens": 32}
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_thinking(client: openai.OpenAI, model: str) -> None:
    arguments: Any = {"model": model, "messages": QUESTION, "max_tokens": 128, "reasoning_effort": "high"}
    answer = client.chat.completions.create(**arguments)
    message: Any = answer.choices[0].message
    assert message.reasoning_content
    assert message.reasoning == message.reasoning_content
    assert "2" in message.content
    assert "think>" not in message.content + message.reasoning_content
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert (answer.usage.completion_tokens_details.reasoning_tokens or 0) > 0
    reasoning = content = ""
    for chunk in client.chat.completions.create(**arguments, stream=True):
        delta: Any = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
    assert (reasoning, content) == (message.reasoning_content, message.content)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
def test_tool_round_trip(client: openai.OpenAI, model: str, thinking: bool, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Hangzhou?"}]
    kwargs = {"chat_template_kwargs": {"enable_thinking": thinking}}
    arguments: Any = {"model": model, "tools": [WEATHER_TOOL], "max_tokens": 200, "extra_body": kwargs}
    if stream:
        with client.chat.completions.stream(messages=messages, **arguments) as events:
            for _ in events:
                pass
            choice: Any = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(messages=messages, **arguments).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["location"] == "Hangzhou"
    messages.append(
        {
            "role": "assistant",
            "content": choice.message.content,
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
            ],
        }
    )
    result = json.dumps({"location": "Hangzhou", "temperature": 7, "condition": "light rain"})
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    final = client.chat.completions.create(messages=messages, **arguments).choices[0]
    assert final.finish_reason == "stop"
    assert "light rain" in (final.message.content or "")


def test_completions(client: openai.OpenAI, model: str) -> None:
    arguments: Any = {"model": model, "prompt": "Huawei is", "max_tokens": 12}
    whole = client.completions.create(**arguments)
    assert whole.choices[0].text.strip()
    pieces = client.completions.create(**arguments, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    echoed = client.completions.create(**arguments, echo=True)
    assert echoed.choices[0].text == "Huawei is" + whole.choices[0].text


def test_prompts_as_texts_and_token_ids(server: Server, client: openai.OpenAI, model: str) -> None:
    texts = ["Huawei is", "Triton is"]
    tokens = [
        httpx.post(f"{server.api}/tokenize", json={"prompt": text}, trust_env=False).json()["tokens"] for text in texts
    ]
    by_text = client.completions.create(model=model, prompt=texts, max_tokens=8)
    by_tokens = client.completions.create(model=model, prompt=tokens, max_tokens=8)
    assert [choice.index for choice in by_text.choices] == [0, 1]
    assert [choice.text for choice in by_text.choices] == [choice.text for choice in by_tokens.choices]
    assert by_text.usage == by_tokens.usage


def test_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=8, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for token in logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(each.logprob for each in token.top_logprobs), "greedy takes the likeliest"
    completion = client.completions.create(model=model, prompt="Huawei is", max_tokens=4, logprobs=2)
    shaped = completion.choices[0].logprobs
    assert shaped is not None
    assert shaped.tokens is not None
    assert "".join(shaped.tokens) == completion.choices[0].text


def test_length_stop_and_sampling(client: openai.OpenAI, model: str) -> None:
    cut = client.completions.create(model=model, prompt="Huawei is", max_tokens=3)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage is not None
    assert cut.usage.completion_tokens == 3
    long = client.completions.create(model=model, prompt="Huawei is", max_tokens=12)
    word = long.choices[0].text.split()[1]
    stopped: Any = client.completions.create(model=model, prompt="Huawei is", max_tokens=12, stop=[word]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == long.choices[0].text.split(word)[0]
    assert stopped.stop_reason == word
    sampled: Any = {"model": model, "prompt": "Huawei is", "max_tokens": 8, "temperature": 1.5, "seed": 7}
    assert client.completions.create(**sampled).choices[0].text == client.completions.create(**sampled).choices[0].text
    several = client.completions.create(**sampled, n=3)
    assert len(several.choices) == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": QUESTION, "max_token": 3}, "max_token"),
        ({"messages": QUESTION, "top_p": 0}, "top_p"),
        ({"messages": QUESTION, "max_tokens": 10**7}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, "messages"),
        ({"messages": QUESTION, "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_mistakes_are_named(client: openai.OpenAI, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    assert caught.value.param == param
    with pytest.raises(openai.BadRequestError):
        client.post("/chat/completions", body={**body, "stream": True}, cast_to=object)


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)


def test_responses(client: openai.OpenAI, model: str) -> None:
    arguments: Any = {"model": model, "input": "What is 1+1?", "max_output_tokens": 64}
    response = client.responses.create(**arguments)
    assert response.status == "completed"
    assert "2" in response.output_text
    assert response.usage is not None
    assert response.usage.total_tokens > 0
    text = ""
    for event in client.responses.create(**arguments, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type == "response.completed":
            assert event.response.output_text == text
    assert text == response.output_text


def test_response_tools(client: openai.OpenAI, model: str) -> None:
    tool: Any = {"type": "function", "strict": False, **WEATHER_TOOL["function"]}
    question: Any = [{"role": "user", "content": "What is the weather in Hangzhou?"}]
    response = client.responses.create(model=model, input=question, tools=[tool], max_output_tokens=128)
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert json.loads(call.arguments)["location"] == "Hangzhou"
    items = [*question, *(item.model_dump(exclude_none=True) for item in response.output)]
    items.append(
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": '{"location": "Hangzhou", "temperature": 7, "condition": "light rain"}',
        }
    )
    final = client.responses.create(model=model, input=items, tools=[tool], max_output_tokens=64)
    assert "light rain" in final.output_text


async def test_ten_streams_one_leaves(server: Server, model: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.api}/v1", api_key="none", max_retries=0) as client:

        async def ask(leaves: bool) -> str:
            arguments: Any = {"messages": QUESTION, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
            stream = await client.chat.completions.create(model=model, stream=True, **arguments)
            text = ""
            async with stream:
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                    if leaves and text:
                        break
            return text

        texts = await asyncio.gather(*(ask(index == 3) for index in range(10)))
    complete = texts[:3] + texts[4:]
    assert len(set(complete)) == 1
    assert complete[0].startswith(texts[3])
    assert len(texts[3]) < len(complete[0])
    await asyncio.to_thread(wait_for, lambda: server.stats()["running"] == 0, 2)


async def test_hanging_up_frees_the_engine(server: Server, model: str) -> None:
    """Also for a request that is not streamed, where nothing is written that could fail."""
    client = openai.AsyncOpenAI(base_url=f"{server.api}/v1", api_key="none", max_retries=0)
    body: Any = {"messages": QUESTION, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    asking = asyncio.create_task(client.chat.completions.create(model=model, **body))
    await asyncio.to_thread(wait_for, lambda: server.stats()["running"] == 1, 10)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.to_thread(wait_for, lambda: server.stats()["running"] == 0, 2)
    await client.close()
