"""The proxy's side of the `deepseek_v4` models: unary encode, streamed generation, control requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import msgspec
from dsv4.errors import ErrorCode, RequestError
from tritonclient.grpc import service_pb2, service_pb2_grpc

from dsv4_clients.proxy import wire
from dsv4_clients.proxy.tasks import run_within

ENGINE_MODEL = "deepseek_v4"
ENCODE_MODEL = "deepseek_v4_encode"

CODED_ERRORS = ("triton_grpc_error", "true")
"""Stream metadata that makes Triton end a failed stream with the error's own gRPC status."""

_MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # else the channels of the pool share one connection
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]
_CODE_BY_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED: ErrorCode.UNSUPPORTED,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorCode.DEADLINE,
    grpc.StatusCode.CANCELLED: ErrorCode.ABORTED,
    grpc.StatusCode.UNAVAILABLE: ErrorCode.ENGINE_DEAD,
    grpc.StatusCode.NOT_FOUND: ErrorCode.ENGINE_DEAD,
}
_NO_FINISH_REASON = (b"", b"None")
"""The second one is what Triton's vLLM backend sends while a stream runs."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncodedChat:
    """What `deepseek_v4_encode` makes of a chat request."""

    input_ids: list[int]
    sampling_parameters: dict[str, Any]
    output_format: bytes


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One request to the engine. Exactly one of `text` and `input_ids` is set."""

    request_id: str
    sampling_parameters: Mapping[str, Any]
    text: str | None = None
    input_ids: Sequence[int] | None = None
    output_format: bytes | None = None
    stream: bool = False
    return_token_ids: bool = False
    return_logprobs: bool = False
    timeout_seconds: float | None = None
    metadata: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, kw_only=True)
class EngineOutput:
    """One response of the engine: everything in it is new since the previous one.

    `logprobs` has one object a token: token_id, token, logprob, top (lists of token id, token, logprob).
    `usage` comes with the last output: prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens.
    """

    text: str = ""
    chat_delta: dict[str, Any] | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: dict[str, Any] | None = None
    num_prompt_tokens: int | None = None


class TritonClient:
    """A small pool of gRPC channels to one tritonserver. Must be made and used inside one event loop."""

    def __init__(self, target: str, *, channels: int = 4) -> None:
        self.target = target
        self._channels = [grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS) for _ in range(channels)]
        self._stubs = itertools.cycle([service_pb2_grpc.GRPCInferenceServiceStub(each) for each in self._channels])
        self._open_calls: set[Any] = set()
        self._failed_calls: dict[Any, RequestError] = {}
        self.last_message_at = float("-inf")
        """Monotonic time of the newest message on any generation."""

    @property
    def open_streams(self) -> int:
        """Number of generations under way."""
        return len(self._open_calls)

    @property
    def reachable(self) -> bool:
        """Whether no channel waits to connect again: one that does fails its calls although the server is up."""
        broken = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.CONNECTING)
        return not any(channel.get_state(try_to_connect=True) in broken for channel in self._channels)

    async def close(self) -> None:
        """Cancel all calls and close the channels."""
        for channel in self._channels:
            await channel.close()

    async def encode(
        self, chat_request: bytes, *, timeout_seconds: float | None, metadata: Sequence[tuple[str, str]] = ()
    ) -> EncodedChat:
        """Prompt and parameters of a chat request (the JSON body of an OpenAI chat request).

        Raises RequestError; INVALID_ARGUMENT messages start with the JSON path of the field at fault.
        """
        request = service_pb2.ModelInferRequest(model_name=ENCODE_MODEL)
        wire.add_string(request, "chat_request", chat_request)
        try:
            response = await next(self._stubs).ModelInfer(request, timeout=timeout_seconds, metadata=tuple(metadata))
        except grpc.aio.AioRpcError as error:
            raise to_request_error(error) from None
        outputs = wire.outputs_of(response)
        return EncodedChat(
            input_ids=wire.read_int32(outputs.get("input_ids")),
            sampling_parameters=msgspec.json.decode(wire.read_string(outputs.get("sampling_parameters")) or b"{}"),
            output_format=wire.read_string(outputs.get("output_format")),
        )

    async def generate(self, generation: Generation) -> AsyncGenerator[EngineOutput, None]:
        """Outputs of one generation; the last one has a finish reason.

        Closing the generator, or cancelling the task that reads it, cancels the request in the engine at once.
        Raises RequestError.
        """
        finished = False
        async for response in self._stream(_generation_message(generation), generation.metadata):
            output = read_output(wire.outputs_of(response))
            finished = finished or output.finish_reason is not None
            yield output
        if not finished:
            raise RequestError(ErrorCode.ENGINE_DEAD, "the engine ended the request without a finish reason")

    async def control(self, command: str, *, timeout_seconds: float, **parameters: str) -> dict[str, Any]:
        """Answer of the engine model to a control request (`health`, `stats`, `abort`, …), without queueing.

        Raises RequestError; DEADLINE when there is no answer in time.
        """
        request = service_pb2.ModelInferRequest(model_name=ENGINE_MODEL, id=f"control-{uuid.uuid4().hex}")
        request.parameters["control"].string_param = command
        for name, value in parameters.items():
            request.parameters[name].string_param = value
        try:
            return await run_within(timeout_seconds, self._control(request))
        except asyncio.TimeoutError:
            message = f"the engine model did not answer '{command}' within {timeout_seconds:g} s"
            raise RequestError(ErrorCode.DEADLINE, message) from None

    async def _control(self, request: service_pb2.ModelInferRequest) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        async for response in self._stream(request, ()):
            text = wire.read_string(wire.outputs_of(response).get("text_output"))
            if text:
                answer = msgspec.json.decode(text)
        return answer

    def fail_open_streams(self, error: RequestError) -> None:
        """End every open stream with `error`: the way out when the model's process died and Triton does not say so."""
        for call in list(self._open_calls):
            self._failed_calls[call] = error
            call.cancel()

    async def _stream(
        self, request: service_pb2.ModelInferRequest, metadata: Sequence[tuple[str, str]]
    ) -> AsyncGenerator[service_pb2.ModelInferResponse, None]:
        call = next(self._stubs).ModelStreamInfer(metadata=(CODED_ERRORS, *metadata))
        is_control = "control" in request.parameters
        if not is_control:
            self._open_calls.add(call)
        try:
            await call.write(request)
            await call.done_writing()
            while (message := await call.read()) is not grpc.aio.EOF:
                if not is_control:
                    self.last_message_at = time.monotonic()
                if message.error_message:
                    raise _from_text(message.error_message, ErrorCode.INTERNAL)
                yield message.infer_response
        except grpc.aio.AioRpcError as error:
            raise to_request_error(error) from None
        except asyncio.InvalidStateError:
            # `write` on a call that has already failed says only that it is done; its status has the reason.
            raise _status_error(await call.code(), await call.details()) from None
        except asyncio.CancelledError:
            failure = self._failed_calls.get(call)
            if failure is None:
                raise
            raise RequestError(failure.code, failure.message) from None
        finally:
            self._open_calls.discard(call)
            self._failed_calls.pop(call, None)
            call.cancel()


def _generation_message(generation: Generation) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=ENGINE_MODEL, id=generation.request_id)
    if generation.input_ids is not None:
        wire.add_int32(request, "input_ids", generation.input_ids)
    else:
        wire.add_string(request, "text_input", (generation.text or "").encode("utf-8"))
    wire.add_string(request, "sampling_parameters", msgspec.json.encode(dict(generation.sampling_parameters)))
    if generation.output_format is not None:
        wire.add_string(request, "output_format", generation.output_format)
    wire.add_bool(request, "stream", generation.stream)
    wire.add_bool(request, "exclude_input_in_output", True)
    wire.add_bool(request, "return_finish_reason", True)
    wire.add_bool(request, "return_num_input_tokens", True)
    if generation.return_token_ids:
        wire.add_bool(request, "return_token_ids", True)
    if generation.return_logprobs:
        wire.add_bool(request, "return_logprobs", True)
    if generation.timeout_seconds is not None:
        request.parameters["timeout"].int64_param = int(generation.timeout_seconds * 1_000_000)
    return request


def read_output(outputs: Mapping[str, bytes]) -> EngineOutput:
    """One engine response from its tensors."""
    finish_reason = wire.read_string(outputs.get("finish_reason"))
    chat_delta = wire.read_string(outputs.get("chat_delta"))
    logprobs = wire.read_string(outputs.get("logprobs"))
    usage = wire.read_string(outputs.get("usage"))
    num_prompt_tokens = wire.read_int32(outputs.get("num_input_tokens"))
    decoded_usage = msgspec.json.decode(usage) if usage else None
    return EngineOutput(
        text=wire.read_string(outputs.get("text_output")).decode("utf-8", "replace"),
        chat_delta=msgspec.json.decode(chat_delta) if chat_delta else None,
        token_ids=wire.read_int32(outputs.get("token_ids")),
        logprobs=[_token_logprob(entry) for entry in msgspec.json.decode(logprobs) or ()] if logprobs else [],
        finish_reason=None if finish_reason in _NO_FINISH_REASON else finish_reason.decode(),
        stop_reason=(decoded_usage or {}).get("stop_reason"),
        usage=decoded_usage,
        num_prompt_tokens=num_prompt_tokens[0] if num_prompt_tokens else None,
    )


def _token_logprob(entry: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One token in the form of Triton's vLLM backend: the generated token first, alternatives have a rank."""
    token_id, chosen = next(iter(entry.items()))
    ranked = sorted((each["rank"], int(key), each) for key, each in entry.items() if each["rank"] is not None)
    return {
        "token_id": int(token_id),
        "token": chosen["decoded_token"],
        "logprob": chosen["logprob"],
        "top": [(key, each["decoded_token"], each["logprob"]) for _, key, each in ranked],
    }


def to_request_error(error: grpc.aio.AioRpcError) -> RequestError:
    """The coded error behind a failed call."""
    return _status_error(error.code(), error.details())


def _status_error(status: grpc.StatusCode, details: str | None) -> RequestError:
    text = details or status.name
    if "Stub process" in text and "not healthy" in text:
        return RequestError(ErrorCode.ENGINE_DEAD, "the engine model's process has died")
    return _from_text(text, _CODE_BY_STATUS.get(status, ErrorCode.INTERNAL))


def _from_text(text: str, fallback: ErrorCode) -> RequestError:
    """A coded message as it is; other text stays in our log, because it may hold paths or a traceback."""
    error = RequestError.parse(text)
    if error.code is not ErrorCode.INTERNAL or "[INTERNAL]" in text:
        return error
    level = logging.DEBUG if fallback is ErrorCode.ENGINE_DEAD else logging.WARNING
    _log.log(level, "tritonserver answered without an error code (%s): %s", fallback.value, text)
    return RequestError(
        fallback, _UNCODED_MESSAGES.get(fallback, "the inference server failed; its log has the reason")
    )


_UNCODED_MESSAGES = {
    ErrorCode.INVALID_ARGUMENT: "the inference server refused the request's tensors",
    ErrorCode.UNSUPPORTED: "the inference server does not offer this",
    ErrorCode.DEADLINE: "the inference server did not answer in time",
    ErrorCode.ABORTED: "the request was cancelled",
    ErrorCode.ENGINE_DEAD: "the inference server cannot be reached or has not loaded the model",
    ErrorCode.INTERNAL: "the inference server failed; its log has the reason",
}
