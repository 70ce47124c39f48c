"""From outputs of the engine to Triton responses, and joining several outputs of a request into one."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np

from dsv4.engine.protocol import FinishReason, RequestOutput, TokenLogprob, Usage
from dsv4.errors import ErrorCode, RequestError
from dsv4.triton.api import BackendUtils
from dsv4.triton.request import OutputOptions

_TRITON_CODE = {
    ErrorCode.INVALID_ARGUMENT: "INVALID_ARG",
    ErrorCode.UNSUPPORTED: "UNSUPPORTED",
    ErrorCode.QUEUE_FULL: "UNAVAILABLE",
    ErrorCode.DEADLINE: "UNAVAILABLE",
    ErrorCode.ABORTED: "CANCELLED",
    ErrorCode.ENGINE_DEAD: "UNAVAILABLE",
    ErrorCode.DEVICE_ERROR: "UNAVAILABLE",
    ErrorCode.DRAINING: "UNAVAILABLE",
    ErrorCode.INTERNAL: "INTERNAL",
}


def triton_error(api: BackendUtils, error: RequestError) -> Any:
    """`pb_utils.TritonError` with our code in front of the message and the nearest code of Triton."""
    return api.TritonError(str(error), getattr(api.TritonError, _TRITON_CODE[error.code]))


def string_tensor(api: BackendUtils, name: str, text: str) -> Any:
    """A STRING tensor with one element."""
    return api.Tensor(name, np.array([text.encode("utf-8")], dtype=np.object_))


class OutputJoiner:
    """Joins outputs of one request, in order, into a single output; empty again after `take`."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._deltas: list[dict[str, Any]] = []
        self._last: RequestOutput | None = None
        self.count = 0

    def add(self, output: RequestOutput) -> None:
        """Append one output."""
        self._text.append(output.text)
        self._token_ids += output.token_ids
        if output.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs += output.logprobs
        if output.chat_delta:
            self._deltas.append(output.chat_delta)
        self._last = output
        self.count += 1

    def take(self) -> RequestOutput | None:
        """Everything added since the last call; None if nothing was."""
        last = self._last
        if last is None:
            return None
        joined = msgspec.structs.replace(
            last,
            text="".join(self._text),
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            chat_delta=join_deltas(self._deltas) if self._deltas else None,
        )
        self._reset()
        return joined


def join_deltas(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """One OpenAI chat delta that means the same as several: strings are joined, tool calls by their index."""
    if len(deltas) == 1:
        return deltas[0]
    texts: dict[str, list[str]] = {}
    joined: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        for name, value in delta.items():
            if name == "tool_calls":
                for call in value:
                    known = calls.setdefault(call["index"], {**call, "function": {**call.get("function", {})}})
                    known["function"].update(
                        {key: part for key, part in call.get("function", {}).items() if key != "arguments"}
                    )
                    arguments.setdefault(call["index"], []).append(call.get("function", {}).get("arguments") or "")
            elif isinstance(value, str) and name != "role":
                texts.setdefault(name, []).append(value)
            elif value is not None or name not in joined:
                joined[name] = value
    joined.update({name: "".join(parts) for name, parts in texts.items()})
    for index, parts in arguments.items():
        calls[index]["function"]["arguments"] = "".join(parts)
    if calls:
        joined["tool_calls"] = [calls[index] for index in sorted(calls)]
    return joined


class ResponseBuilder:
    """Makes the Triton responses of one request."""

    def __init__(self, api: BackendUtils, options: OutputOptions) -> None:
        self._api = api
        self.options = options

    def build(self, output: RequestOutput) -> Any:
        """`pb_utils.InferenceResponse` of one output, or of its error."""
        if output.error is not None:
            return self._api.InferenceResponse(error=triton_error(self._api, RequestError.parse(output.error)))
        return self._api.InferenceResponse(output_tensors=self._tensors(output))

    def _tensors(self, output: RequestOutput) -> list[Any]:
        api, options = self._api, self.options
        tensors = [string_tensor(api, "text_output", options.echo + output.text)]
        if options.finish_reason:
            tensors.append(string_tensor(api, "finish_reason", _finish_reason_text(output.finish_reason)))
        if options.cumulative_logprob and output.cumulative_logprob is not None:
            value = np.array([output.cumulative_logprob], dtype=np.float32)
            tensors.append(api.Tensor("cumulative_logprob", value))
        if options.logprobs:
            text = "null" if output.logprobs is None else json.dumps([vllm_logprobs(each) for each in output.logprobs])
            tensors.append(string_tensor(api, "logprobs", text))
        if options.num_input_tokens:
            tensors.append(api.Tensor("num_input_tokens", np.array([output.num_prompt_tokens], dtype=np.uint32)))
        if options.num_output_tokens:
            tensors.append(api.Tensor("num_output_tokens", np.array([len(output.token_ids)], dtype=np.uint32)))
        if options.token_ids:
            tensors.append(api.Tensor("token_ids", np.array(output.token_ids, dtype=np.int32)))
        if output.chat_delta is not None:
            tensors.append(string_tensor(api, "chat_delta", json.dumps(output.chat_delta, ensure_ascii=False)))
        if output.usage is not None:
            tensors.append(string_tensor(api, "usage", json.dumps(usage_object(output.usage, output.stop_reason))))
        return tensors


def _finish_reason_text(reason: FinishReason | None) -> str:
    """The vLLM backend sends the text `None` until the last response, and its clients compare with that."""
    return "None" if reason is None else reason.value


def vllm_logprobs(entry: TokenLogprob) -> dict[str, dict[str, Any]]:
    """One generated token in the form of the vLLM backend: the generated token first, then the alternatives.

    `rank` counts from 1; it is null for a generated token that is not among the alternatives.
    """
    alternatives = {
        str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": token}
        for rank, (token_id, token, logprob) in enumerate(entry.top, start=1)
    }
    chosen = {"logprob": _finite(entry.logprob), "rank": None, "decoded_token": entry.token}
    key = str(entry.token_id)
    return {key: alternatives.get(key, chosen), **alternatives}


def _finite(logprob: float) -> float:
    """JSON has no infinity; vLLM's servers write the log of zero as -9999."""
    return max(logprob, -9999.0)


def usage_object(usage: Usage, stop_reason: int | str | None) -> dict[str, Any]:
    """The `usage` tensor's JSON: token counts, and the stop string or token id that ended the request."""
    return {**msgspec.to_builtins(usage), "total_tokens": usage.prompt_tokens + usage.completion_tokens} | (
        {} if stop_reason is None else {"stop_reason": stop_reason}
    )
