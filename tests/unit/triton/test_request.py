"""Reading tensors and parameters: what is accepted, and that every refusal names the field."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from dsv4.errors import ErrorCode, RequestError
from dsv4.triton.request import Control, Generation, read_request

from tests.unit.triton.fakes import FakeRequest


def read(**arguments: Any) -> Generation:
    parsed = read_request(FakeRequest(**arguments), engine_request_id="r#1")
    assert isinstance(parsed, Generation)
    return parsed


def test_text_prompt_with_defaults_is_greedy_and_echoed_like_the_vllm_backend() -> None:
    generation = read(text_input="Huawei is", request_id="mine")
    assert generation.client_id == "mine"
    assert generation.request.request_id == "r#1"
    assert generation.request.prompt_text == "Huawei is"
    assert generation.request.prompt_token_ids is None
    assert generation.request.sampling_parameters.greedy
    assert generation.request.timeout_seconds is None
    assert generation.options.echo == "Huawei is"


@pytest.mark.parametrize(
    "inputs",
    [
        {"text_input": "a", "stream": True},
        {"text_input": "a", "exclude_input_in_output": True},
        {"input_ids": [1, 2]},
        {"text_input": "a", "output_format": "{}"},
    ],
)
def test_prompt_is_not_echoed(inputs: dict[str, Any]) -> None:
    assert read(**inputs).options.echo == ""


def test_token_ids_and_flags() -> None:
    generation = read(input_ids=[5, 6], stream=True, return_token_ids=True, return_finish_reason=True)
    assert generation.request.prompt_token_ids == [5, 6]
    assert generation.options.stream
    assert generation.options.token_ids
    assert generation.options.finish_reason
    assert not generation.options.num_input_tokens


def test_tensor_and_scalar_parameters_are_sampling_parameters() -> None:
    sampling = read(
        text_input="a",
        sampling_parameters=json.dumps({"max_tokens": 7, "stop": ["x"]}),
        parameters={"temperature": 0.5, "seed": 3, "priority": 2},
    ).request.sampling_parameters
    assert (sampling.max_tokens, sampling.stop, sampling.temperature) == (7, ["x"], 0.5)
    assert (sampling.seed, sampling.priority) == (3, 2)


def test_wanting_logprobs_turns_them_on() -> None:
    assert read(text_input="a").request.sampling_parameters.logprobs is None
    assert read(text_input="a", return_logprobs=True).request.sampling_parameters.logprobs == 0
    assert read(text_input="a", return_cumulative_logprob=True).request.sampling_parameters.logprobs == 0
    wanted = read(text_input="a", return_logprobs=True, parameters={"logprobs": 4})
    assert wanted.request.sampling_parameters.logprobs == 4


def test_nearest_deadline_wins() -> None:
    assert read(text_input="a", timeout=2_000_000).request.timeout_seconds == 2.0
    assert read(text_input="a", parameters={"timeout_ms": 1500}).request.timeout_seconds == 1.5
    assert read(text_input="a", timeout=2_000_000, parameters={"timeout_ms": 500}).request.timeout_seconds == 0.5
    assert read(text_input="a", parameters={"timeout": 3_000_000, "id": "x"}).request.timeout_seconds == 3.0


def test_control_requests() -> None:
    health = read_request(FakeRequest(parameters={"control": "health"}), engine_request_id="c")
    assert health == Control("health")
    abort = FakeRequest(parameters={"control": "abort", "abort_request_id": "mine"})
    assert read_request(abort, engine_request_id="c") == Control("abort", "mine")


BAD = [
    ({}, "text_input"),
    ({"text_input": "a", "input_ids": [1]}, "text_input"),
    ({"text_input": ""}, "text_input"),
    ({"text_input": b"\xff"}, "text_input"),
    ({"text_input": np.array([b"a", b"b"], dtype=np.object_)}, "text_input"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [1, -1]}, "input_ids"),
    ({"text_input": "a", "stream": True, "exclude_input_in_output": False}, "exclude_input_in_output"),
    ({"input_ids": [1], "exclude_input_in_output": False}, "exclude_input_in_output"),
    ({"text_input": "a", "sampling_parameters": "{"}, "sampling_parameters"),
    ({"text_input": "a", "sampling_parameters": "[1]"}, "sampling_parameters"),
    ({"text_input": "a", "sampling_parameters": '{"max_token": 3}'}, "sampling_parameters.max_token"),
    ({"text_input": "a", "sampling_parameters": '{"top_p": 0}'}, "top_p"),
    ({"text_input": "a", "sampling_parameters": '{"top_k": "x"}'}, "top_k"),
    ({"text_input": "a", "parameters": {"temperature": "hot"}}, "temperature"),
    ({"text_input": "a", "parameters": {"max_token": 5}}, "max_token"),
    ({"text_inputs": "a", "parameters": {"text_inputs": "a"}}, "text_inputs"),
    ({"text_input": "a", "sampling_parameters": '{"seed": 1}', "parameters": {"seed": 2}}, "seed"),
    ({"text_input": "a", "output_format": "{"}, "output_format"),
    ({"text_input": "a", "output_format": '{"typo": 1}'}, "output_format.typo"),
    ({"text_input": "a", "parameters": {"timeout_ms": 0}}, "timeout_ms"),
    ({"text_input": "a", "parameters": {"timeout_ms": "soon"}}, "timeout_ms"),
    ({"parameters": {"control": "reboot"}}, "control"),
    ({"parameters": {"control": "abort"}}, "abort_request_id"),
    ({"parameters": {"control": "abort", "abort_request_id": ""}}, "abort_request_id"),
    ({"parameters": {"control": "health", "abort_request_id": "x"}}, "abort_request_id"),
    ({"text_input": "a", "parameters": {"abort_request_id": "x"}}, "abort_request_id"),
]


@pytest.mark.parametrize(
    ("arguments", "field"), BAD, ids=[f"{number}-{field}" for number, (_, field) in enumerate(BAD)]
)
def test_refusals_name_the_field(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_request(FakeRequest(**arguments), engine_request_id="r#1")
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert str(caught.value).startswith(f"[INVALID_ARGUMENT] {field}: ")


def test_misspelt_names_get_a_hint() -> None:
    with pytest.raises(RequestError, match="did you mean 'max_tokens'"):
        read_request(FakeRequest(text_input="a", parameters={"max_token": 5}), engine_request_id="r")
    with pytest.raises(RequestError, match="did you mean 'text_input'"):
        read_request(FakeRequest(parameters={"text_inputs": "a"}), engine_request_id="r")
