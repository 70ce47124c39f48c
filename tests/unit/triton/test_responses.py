"""Outputs of the engine as tensors, and joining them."""

from __future__ import annotations

import json
import math

import numpy as np
from dsv4.engine.protocol import FinishReason, RequestOutput, TokenLogprob, Usage
from dsv4.errors import ErrorCode
from dsv4.triton.request import OutputOptions
from dsv4.triton.responses import OutputJoiner, ResponseBuilder, join_deltas, vllm_logprobs

from tests.unit.triton.fakes import FakeTritonError, FakeUtils

EVERYTHING = OutputOptions(
    stream=True,
    finish_reason=True,
    cumulative_logprob=True,
    logprobs=True,
    num_input_tokens=True,
    num_output_tokens=True,
    token_ids=True,
)


def test_only_wanted_tensors_are_sent() -> None:
    response = ResponseBuilder(FakeUtils(), OutputOptions()).build(RequestOutput(request_id="r", text="é"))
    assert list(response.tensors) == ["text_output"]
    assert response.text() == "é"


def test_every_tensor_has_its_type() -> None:
    output = RequestOutput(
        request_id="r",
        text="ab",
        token_ids=[3, 4],
        chat_delta={"content": "ab"},
        logprobs=[TokenLogprob(token_id=3, token="a", logprob=-0.5)],
        cumulative_logprob=-1.5,
        num_prompt_tokens=9,
        finish_reason=FinishReason.STOP,
        stop_reason="END",
        usage=Usage(prompt_tokens=9, completion_tokens=2),
    )
    tensors = ResponseBuilder(FakeUtils(), EVERYTHING).build(output).tensors
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "text_output": np.object_,
        "finish_reason": np.object_,
        "cumulative_logprob": np.float32,
        "logprobs": np.object_,
        "num_input_tokens": np.uint32,
        "num_output_tokens": np.uint32,
        "token_ids": np.int32,
        "chat_delta": np.object_,
        "usage": np.object_,
    }
    assert tensors["token_ids"].tolist() == [3, 4]
    assert tensors["num_output_tokens"].tolist() == [2]
    assert tensors["finish_reason"][0] == b"stop"
    usage = json.loads(tensors["usage"][0])
    assert (usage["prompt_tokens"], usage["total_tokens"], usage["stop_reason"]) == (9, 11, "END")


def test_finish_reason_is_the_text_none_while_running() -> None:
    response = ResponseBuilder(FakeUtils(), EVERYTHING).build(RequestOutput(request_id="r"))
    assert response.text("finish_reason") == "None"


def test_errors_keep_their_code() -> None:
    output = RequestOutput(request_id="r", error="[QUEUE_FULL] 8 requests wait")
    error = ResponseBuilder(FakeUtils(), OutputOptions()).build(output).error
    assert error.text == "[QUEUE_FULL] 8 requests wait"
    assert error.triton_code == FakeTritonError.UNAVAILABLE


def test_every_code_has_a_triton_code() -> None:
    for code in ErrorCode:
        output = RequestOutput(request_id="r", error=f"[{code.value}] text")
        error = ResponseBuilder(FakeUtils(), OutputOptions()).build(output).error
        assert error.text == f"[{code.value}] text"


def test_logprobs_have_the_form_of_the_vllm_backend() -> None:
    entry = TokenLogprob(token_id=7, token="x", logprob=-2.0, top=[(5, "y", -0.5), (7, "x", -2.0)])
    assert vllm_logprobs(entry) == {
        "7": {"logprob": -2.0, "rank": 2, "decoded_token": "x"},
        "5": {"logprob": -0.5, "rank": 1, "decoded_token": "y"},
    }
    assert list(vllm_logprobs(entry)) == ["7", "5"]
    outside = TokenLogprob(token_id=9, token="z", logprob=-math.inf, top=[(5, "y", -0.5)])
    assert vllm_logprobs(outside)["9"] == {"logprob": -9999.0, "rank": None, "decoded_token": "z"}


def test_joined_outputs_equal_one_output() -> None:
    joiner = OutputJoiner()
    assert joiner.take() is None
    joiner.add(RequestOutput(request_id="r", text="a", token_ids=[1], chat_delta={"role": "assistant", "content": "a"}))
    joiner.add(RequestOutput(request_id="r", text="b", token_ids=[2, 3], chat_delta={"content": "b"}))
    joiner.add(RequestOutput(request_id="r", text="", token_ids=[4], finish_reason=FinishReason.STOP))
    assert joiner.take() == RequestOutput(
        request_id="r",
        text="ab",
        token_ids=[1, 2, 3, 4],
        chat_delta={"role": "assistant", "content": "ab"},
        finish_reason=FinishReason.STOP,
    )
    assert joiner.take() is None


def test_tool_calls_are_joined_by_index() -> None:
    deltas = [
        {"reasoning_content": "hm", "content": None},
        {"tool_calls": [{"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": "1}"}},
                {"index": 1, "id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ]
        },
    ]
    originals = json.dumps(deltas)
    assert join_deltas(deltas) == {
        "reasoning_content": "hm",
        "content": None,
        "tool_calls": [
            {"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
            {"index": 1, "id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    assert json.dumps(deltas) == originals
