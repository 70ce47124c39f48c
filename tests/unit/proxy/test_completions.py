from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.unit.proxy.conftest import StartProxy
from tests.unit.proxy.test_chat_completions import events_of
from tests.unit.proxy.triton_double import EngineRequest, Reply, TritonDouble, usage

PATH = "/v1/completions"


def mirror(request: EngineRequest) -> list[Reply]:
    """Answers with what the prompt was."""
    prompt = request.inputs.get("text_input") or str(request.inputs.get("input_ids"))
    assert request.inputs["exclude_input_in_output"] is True
    return [Reply(f"after {prompt}", None, "stop", usage(4, 2), token_ids=[8, 9])]


async def test_continues_a_text(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    answer = (await client.post(PATH, json={"prompt": "Huawei is", "max_tokens": 20})).json()
    assert answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert choice["text"] == "Hello world"
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    (request,) = triton.requests
    assert request.inputs["text_input"] == "Huawei is"
    assert request.inputs["sampling_parameters"] == {"max_tokens": 20}
    assert "output_format" not in request.inputs


async def test_default_length_is_openais(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    await client.post(PATH, json={"prompt": "x"})
    await client.post(PATH, json={"prompt": "x", "max_tokens": None})
    assert [request.inputs["sampling_parameters"] for request in triton.requests] == [{"max_tokens": 16}, {}]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a", ["after a"]),
        (["a", "b"], ["after a", "after b"]),
        ([1, 2], ["after [1, 2]"]),
        ([[1], [2, 3]], ["after [1]", "after [2, 3]"]),
    ],
)
async def test_forms_of_the_prompt(
    client: httpx.AsyncClient, triton: TritonDouble, prompt: Any, texts: list[str]
) -> None:
    triton.script = mirror
    answer = (await client.post(PATH, json={"prompt": prompt})).json()
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    assert answer["usage"]["prompt_tokens"] == 4 * len(texts)
    assert answer["usage"]["completion_tokens"] == 2 * len(texts)


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(
    client: httpx.AsyncClient, triton: TritonDouble
) -> None:
    triton.script = mirror
    answer = (await client.post(PATH, json={"prompt": ["a", "b"], "n": 2, "temperature": 1})).json()
    assert [choice["text"] for choice in answer["choices"]] == ["after a", "after a", "after b", "after b"]
    assert answer["usage"]["prompt_tokens"] == 8
    assert answer["usage"]["completion_tokens"] == 8


async def test_echo_puts_the_prompt_first(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    triton.script = mirror
    answer = (await client.post(PATH, json={"prompt": "a", "echo": True})).json()
    assert answer["choices"][0]["text"] == "aafter a"
    chunks = events_of((await client.post(PATH, json={"prompt": "a", "echo": True, "stream": True})).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "aafter a"


async def test_streams_text(client: httpx.AsyncClient) -> None:
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    chunks = events_of((await client.post(PATH, json=body)).text)
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["Hello", " world", ""]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["total_tokens"] == 8


async def test_streams_of_several_prompts_are_all_complete(client: httpx.AsyncClient) -> None:
    prompts = [str(number) for number in range(20)]
    chunks = events_of((await client.post(PATH, json={"prompt": prompts, "stream": True})).text)
    texts = dict.fromkeys(range(20), "")
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert set(texts.values()) == {"Hello world"}


async def test_logprobs_have_offsets(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    def entry(token: str, logprob: float) -> dict[str, Any]:
        return {"token_id": 1, "token": token, "logprob": logprob, "top": [[1, token, logprob]]}

    triton.script = lambda request: [
        Reply("Hi", logprobs=[entry("H", -1.0), entry("i", -2.0)]),
        Reply("!", finish_reason="stop", usage=usage(1, 3), logprobs=[entry("!", -0.5)]),
    ]
    expected = {
        "tokens": ["H", "i", "!"],
        "token_logprobs": [-1.0, -2.0, -0.5],
        "top_logprobs": [{"H": -1.0}, {"i": -2.0}, {"!": -0.5}],
        "text_offset": [0, 1, 2],
    }
    answer = (await client.post(PATH, json={"prompt": "x", "logprobs": 1})).json()
    assert answer["choices"][0]["logprobs"] == expected
    chunks = events_of((await client.post(PATH, json={"prompt": "x", "logprobs": 1, "stream": True})).text)
    assert chunks[1]["choices"][0]["logprobs"]["text_offset"] == [2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, 2**40]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": [1], "echo": True}, "echo"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "messages": []}, "messages"),
    ],
)
async def test_wrong_fields_are_named(
    client: httpx.AsyncClient, triton: TritonDouble, fields: dict[str, Any], param: str
) -> None:
    response = await client.post(PATH, json=fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"].partition("[")[0] == param.partition("[")[0]
    assert error["message"].startswith(param.partition("[")[0])
    assert triton.requests == []


async def test_prompt_limit_counts_token_ids(start_proxy: StartProxy, triton: TritonDouble) -> None:
    client = await start_proxy(max_prompt_tokens=2)
    response = await client.post(PATH, json={"prompt": [1, 2, 3]})
    assert response.status_code == 400
    assert triton.requests == []
