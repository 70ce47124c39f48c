"""The tensor contract of the models, in one place. It follows the names of Triton's vLLM backend."""

from __future__ import annotations

from typing import NamedTuple

from dsv4.triton.api import AutoCompleteConfig


class TensorSpec(NamedTuple):
    """One declared tensor; `dims` as in config.pbtxt, -1 for any length."""

    name: str
    data_type: str
    dims: list[int]


RETURN_FLAGS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_token_ids",
)

ENGINE_INPUTS = (
    TensorSpec("text_input", "TYPE_STRING", [1]),
    TensorSpec("input_ids", "TYPE_INT32", [-1]),
    TensorSpec("stream", "TYPE_BOOL", [1]),
    TensorSpec("sampling_parameters", "TYPE_STRING", [1]),
    TensorSpec("output_format", "TYPE_STRING", [1]),
    TensorSpec("exclude_input_in_output", "TYPE_BOOL", [1]),
    *(TensorSpec(name, "TYPE_BOOL", [1]) for name in RETURN_FLAGS),
)

ENGINE_OUTPUTS = (
    TensorSpec("text_output", "TYPE_STRING", [-1]),
    TensorSpec("finish_reason", "TYPE_STRING", [-1]),
    TensorSpec("cumulative_logprob", "TYPE_FP32", [-1]),
    TensorSpec("logprobs", "TYPE_STRING", [-1]),
    TensorSpec("num_input_tokens", "TYPE_UINT32", [1]),
    TensorSpec("num_output_tokens", "TYPE_UINT32", [-1]),
    TensorSpec("token_ids", "TYPE_INT32", [-1]),
    TensorSpec("chat_delta", "TYPE_STRING", [-1]),
    TensorSpec("usage", "TYPE_STRING", [-1]),
)

ENCODE_INPUTS = (TensorSpec("chat_request", "TYPE_STRING", [1]),)

ENCODE_OUTPUTS = (
    TensorSpec("input_ids", "TYPE_INT32", [-1]),
    TensorSpec("sampling_parameters", "TYPE_STRING", [1]),
    TensorSpec("output_format", "TYPE_STRING", [1]),
)


def complete_engine_config(config: AutoCompleteConfig) -> AutoCompleteConfig:
    """Declare the tensors of `deepseek_v4` and that it is decoupled."""
    config.set_model_transaction_policy({"decoupled": True})
    return _complete(config, ENGINE_INPUTS, ENGINE_OUTPUTS)


def complete_encode_config(config: AutoCompleteConfig) -> AutoCompleteConfig:
    """Declare the tensors of `deepseek_v4_encode`."""
    return _complete(config, ENCODE_INPUTS, ENCODE_OUTPUTS)


def _complete(
    config: AutoCompleteConfig, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> AutoCompleteConfig:
    """All inputs are optional for Triton, so that a missing one gets our message instead of none."""
    for tensor in inputs:
        config.add_input({**tensor._asdict(), "optional": True})
    for tensor in outputs:
        config.add_output(tensor._asdict())
    config.set_max_batch_size(0)
    return config
