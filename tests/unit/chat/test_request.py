"""Whole requests: names and values of sampling parameters, fields of the transport, limits, and refusals."""

from __future__ import annotations

import json

import pytest
from dsv4.chat import ChatParser, encode_request
from dsv4.errors import ErrorCode, RequestError
from dsv4.sampling_parameters import parse_sampling_parameters

from tests.unit.chat.small_vocabulary import small_tokenizer

TOKENIZER = small_tokenizer()
MESSAGES = [{"role": "user", "content": "the weather"}]


def encode(max_model_len=None, **fields):
    body = {"messages": MESSAGES, **fields}
    return encode_request(body, tokenizer=TOKENIZER, revision="preview", max_model_len=max_model_len)


def refusal(max_model_len=None, **fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        encode(max_model_len, **fields)
    assert caught.value.message.startswith(caught.value.field)
    return caught.value


def test_result_is_plain_json_that_the_engine_accepts(weather_tool):
    encoded = encode(
        model="m",
        stream=True,
        stream_options={"include_usage": True},
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=3,
        stop="END",
        max_completion_tokens=20,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={"5": -100},
        logprobs=True,
        top_logprobs=2,
        ignore_eos=False,
        min_tokens=1,
        stop_token_ids=[7],
        include_stop_str_in_output=True,
        priority=1,
        user="u",
        metadata={"a": "b"},
        n=1,
        tools=[weather_tool],
        include_reasoning=False,
        reasoning_effort="high",
    )
    sampling = json.loads(json.dumps(encoded.sampling_parameters))
    assert sampling == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["END"],
        "max_tokens": 20,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100},
        "logprobs": 2,
        "ignore_eos": False,
        "min_tokens": 1,
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "priority": 1,
    }
    assert parse_sampling_parameters(sampling).max_tokens == 20
    output_format = json.loads(json.dumps(encoded.output_format))
    assert output_format["start_state"] == "reasoning"
    assert output_format["tools"] == ["get_weather"]
    assert output_format["include_reasoning"] is False
    ChatParser.from_output_format(output_format, TOKENIZER)
    assert encoded.input_ids.tolist() == encoded.chat.token_ids
    assert encoded.input_ids.itemsize == 4


def test_nothing_given_means_nothing_sent():
    assert encode().sampling_parameters == {}
    assert (
        encode(temperature=None, stop=None, tools=None, stream_options=None, functions=None).sampling_parameters == {}
    )


def test_body_as_text():
    body = json.dumps({"messages": MESSAGES}, ensure_ascii=False)
    expected = encode().input_ids
    assert encode_request(body, tokenizer=TOKENIZER, revision="preview").input_ids == expected
    assert encode_request(body.encode(), tokenizer=TOKENIZER, revision="preview").input_ids == expected
    for bad in ("{", "[]", '{"messages": NaN}', b"\xff", "[" * 100_000):
        with pytest.raises(RequestError) as caught:
            encode_request(bad, tokenizer=TOKENIZER, revision="preview")
        assert caught.value.field == "chat_request"


def test_both_token_limits():
    assert encode(max_tokens=5, max_completion_tokens=5).sampling_parameters == {"max_tokens": 5}
    assert refusal(max_tokens=5, max_completion_tokens=6).field == "max_tokens"
    assert encode(max_tokens=5.0).sampling_parameters == {"max_tokens": 5}


def test_limits_of_the_context():
    length = len(encode().input_ids)
    assert encode(length + 5, max_tokens=5)
    assert encode(length + 1)
    assert refusal(length + 4, max_tokens=5).field == "max_tokens"
    assert refusal(length + 4, max_completion_tokens=5).field == "max_completion_tokens"
    assert refusal(length).field == "messages"


@pytest.mark.parametrize(
    ("fields", "field", "hint"),
    [
        ({"max_token": 3}, "max_token", "did you mean 'max_tokens'?"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"xyzzy": 1}, "xyzzy", "unknown field"),
        ({"temperature": "hot"}, "temperature", "float"),
        ({"temperature": 2.1}, "temperature", "2"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"max_tokens": 1.5}, "max_tokens", "1.5"),
        ({"n": 2}, "n", "1"),
        ({"stop": [""]}, "stop", "empty"),
        ({"stop": ["a", 1]}, "stop[1]", "string"),
        ({"stop": ["\ud800"]}, "stop[0]", "surrogate"),
        ({"stop": 5}, "stop", "array"),
        ({"stop": list("abcdefghijklmnopq")}, "stop", "16"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": {}}, "stream_options", "stream"),
        ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag", "include_usage"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean"),
        ({"logprobs": 5}, "logprobs", "boolean"),
        ({"top_logprobs": 5}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "99999"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "x"),
        ({"stop_token_ids": [99999]}, "stop_token_ids", "99999"),
        ({"modalities": ["audio"]}, "modalities", "text"),
        ({"model": 3}, "model", "string"),
    ],
)
def test_refusals(fields, field, hint):
    error = refusal(**fields)
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert error.field == field
    assert hint in error.message


@pytest.mark.parametrize("name", ["functions", "function_call", "audio", "prediction", "web_search_options"])
def test_known_but_unsupported(name):
    error = refusal(**{name: {}})
    assert error.code is ErrorCode.UNSUPPORTED
    assert error.field == name
