"""A gRPC server that speaks KServe v2 like tritonserver with the project's models, with scripted answers.

Only the transport is replaced: the proxy under test runs as a whole, over real sockets.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from dsv4_clients.proxy import wire
from tritonclient.grpc import service_pb2, service_pb2_grpc


@dataclass
class Reply:
    """One engine response: tensors by name. `after` seconds pass before it is sent."""

    text: str = ""
    chat_delta: dict[str, Any] | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    token_ids: Sequence[int] = ()
    logprobs: list[dict[str, Any]] | None = None
    after: float = 0.0


@dataclass
class Failure:
    """The stream ends with this gRPC status and message."""

    message: str
    status: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT
    after: float = 0.0


Step = Reply | Failure
Script = Callable[["EngineRequest"], Sequence[Step]]


@dataclass
class EngineRequest:
    """An engine request as it arrived, decoded."""

    request_id: str
    inputs: dict[str, Any]
    parameters: dict[str, Any]
    metadata: dict[str, str]
    cancelled_at: float | None = None
    sent: int = 0


def usage(prompt: int, completion: int, **more: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, **more}


def hello(request: EngineRequest) -> Sequence[Step]:
    """The default script: two words, streamed or in one response."""
    is_chat = "output_format" in request.inputs
    counts = usage(5, 3, cached_tokens=2, reasoning_tokens=0)

    def reply(text: str, tokens: list[int], **more: Any) -> Reply:
        return Reply(text, {"content": text} if is_chat else None, token_ids=tokens, **more)

    if request.inputs.get("stream"):
        return [reply("Hello", [1]), reply(" world", [2]), reply("", [3], finish_reason="stop", usage=counts)]
    return [reply("Hello world", [1, 2, 3], finish_reason="stop", usage=counts)]


@dataclass
class TritonDouble(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Encodes chats into the ids 0..4 and answers generations with `script`."""

    script: Script = hello
    health: dict[str, Any] = field(default_factory=lambda: {"ready": True, "state": "ready", "max_model_len": 512})
    health_failure: Failure | None = None
    encode_failure: Failure | None = None
    encoded: list[dict[str, Any]] = field(default_factory=list)
    requests: list[EngineRequest] = field(default_factory=list)
    port: int = 0

    async def start(self) -> None:
        self._server = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def ModelInfer(  # noqa: N802 - the name of the service
        self, request: service_pb2.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> service_pb2.ModelInferResponse:
        assert request.model_name == "deepseek_v4_encode"
        if self.encode_failure is not None:
            await context.abort(self.encode_failure.status, self.encode_failure.message)
        body = json.loads(_inputs(request)["chat_request"])
        self.encoded.append(body)
        sampling_names = ("max_tokens", "temperature", "seed", "stop", "logprobs", "structured_outputs", "top_p")
        sampling = {name: body[name] for name in sampling_names if name in body}
        response = service_pb2.ModelInferResponse(model_name=request.model_name)
        _add_output(response, "input_ids", "INT32", b"".join(i.to_bytes(4, "little") for i in range(5)))
        _add_string(response, "sampling_parameters", json.dumps(sampling))
        _add_string(response, "output_format", json.dumps({"start_state": "content"}))
        return response

    async def ModelStreamInfer(  # noqa: N802 - the name of the service
        self, requests: AsyncIterator[service_pb2.ModelInferRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[service_pb2.ModelStreamInferResponse]:
        async for request in requests:
            parameters = {
                name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in request.parameters.items()
            }
            if "control" in parameters:
                yield await self._answer_control(parameters, context)
                continue
            metadata = dict(context.invocation_metadata())
            engine_request = EngineRequest(request.id, _inputs(request), parameters, metadata)
            self.requests.append(engine_request)
            try:
                for step in self.script(engine_request):
                    await asyncio.sleep(step.after)
                    if isinstance(step, Failure):
                        await context.abort(step.status, step.message)
                    engine_request.sent += 1
                    yield service_pb2.ModelStreamInferResponse(infer_response=_response(engine_request, step))
            except (asyncio.CancelledError, GeneratorExit):
                engine_request.cancelled_at = asyncio.get_running_loop().time()
                raise

    async def _answer_control(
        self, parameters: dict[str, Any], context: grpc.aio.ServicerContext
    ) -> service_pb2.ModelStreamInferResponse:
        if parameters["control"].endswith("_profile"):
            return _control_answer({"profiling": parameters["control"] == "start_profile"})
        assert parameters["control"] == "health"
        if self.health_failure is not None:
            await asyncio.sleep(self.health_failure.after)
            await context.abort(self.health_failure.status, self.health_failure.message)
        return _control_answer(self.health)


def _control_answer(answer: dict[str, Any]) -> service_pb2.ModelStreamInferResponse:
    response = service_pb2.ModelInferResponse(model_name="deepseek_v4")
    _add_string(response, "text_output", json.dumps(answer))
    return service_pb2.ModelStreamInferResponse(infer_response=response)


def _inputs(request: service_pb2.ModelInferRequest) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for tensor, data in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            (text,) = wire.read_strings(data)
            values[tensor.name] = text.decode()
        elif tensor.datatype == "BOOL":
            values[tensor.name] = data == b"\x01"
        else:
            values[tensor.name] = wire.read_int32(data)
    if "sampling_parameters" in values:
        values["sampling_parameters"] = json.loads(values["sampling_parameters"])
    return values


def _response(request: EngineRequest, reply: Reply) -> service_pb2.ModelInferResponse:
    response = service_pb2.ModelInferResponse(model_name="deepseek_v4", id=request.request_id)
    _add_string(response, "text_output", reply.text)
    _add_string(response, "finish_reason", reply.finish_reason or "")
    _add_string(response, "chat_delta", json.dumps(reply.chat_delta) if reply.chat_delta is not None else "")
    _add_string(response, "usage", json.dumps(reply.usage) if reply.usage else "")
    _add_string(response, "logprobs", json.dumps([_vllm_form(each) for each in reply.logprobs or ()]))
    if request.inputs.get("return_token_ids"):
        _add_output(response, "token_ids", "INT32", b"".join(i.to_bytes(4, "little") for i in reply.token_ids))
    _add_output(response, "num_input_tokens", "UINT32", (5).to_bytes(4, "little"))
    return response


def _vllm_form(entry: dict[str, Any]) -> dict[str, Any]:
    """Log probabilities travel in the form of Triton's vLLM backend."""
    ranked = {
        str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": token}
        for rank, (token_id, token, logprob) in enumerate(entry["top"], start=1)
    }
    chosen = {"logprob": entry["logprob"], "rank": None, "decoded_token": entry["token"]}
    key = str(entry["token_id"])
    return {key: ranked.get(key, chosen), **ranked}


def _add_string(response: service_pb2.ModelInferResponse, name: str, text: str) -> None:
    data = text.encode()
    _add_output(response, name, "BYTES", len(data).to_bytes(4, "little") + data)


def _add_output(response: service_pb2.ModelInferResponse, name: str, datatype: str, data: bytes) -> None:
    response.outputs.add(name=name, datatype=datatype, shape=[1])
    response.raw_output_contents.append(data)
