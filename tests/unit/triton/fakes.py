"""A typed stand-in for `triton_python_backend_utils` and a scripted engine, for tests without a server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from dsv4.engine.protocol import FinishReason, GenerateRequest, RequestOutput, Usage


class FakeTensor:
    def __init__(self, name: str, values: np.ndarray) -> None:
        assert isinstance(values, np.ndarray), "Triton takes only arrays"
        self._name = name
        self._values = values

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._values


class FakeTritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self.text = message
        self.triton_code = code


class FakeResponse:
    def __init__(self, output_tensors: list[FakeTensor] | None = None, error: FakeTritonError | None = None) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors or []}
        self.error = error

    def text(self, name: str = "text_output") -> str:
        return self.tensors[name][0].decode()


class FakeMetric:
    def __init__(self) -> None:
        self.value = 0.0
        self.observed: list[float] = []

    def set(self, value: float) -> None:
        self.value = value

    def increment(self, value: float) -> None:
        assert value >= 0
        self.value += value

    def observe(self, value: float) -> None:
        self.observed.append(value)


class FakeMetricFamily:
    COUNTER, GAUGE, HISTOGRAM = range(3)
    registered: list[FakeMetricFamily]

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name, self.kind = name, kind
        self.metrics: dict[tuple[tuple[str, str], ...], FakeMetric] = {}

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> FakeMetric:  # noqa: N802
        assert (self.kind == self.HISTOGRAM) == (buckets is not None)
        return self.metrics.setdefault(tuple(sorted(labels.items())), FakeMetric())


class FakeUtils:
    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    Tensor = FakeTensor
    InferenceResponse = FakeResponse
    TritonError = FakeTritonError

    def __init__(self) -> None:
        self.families: list[FakeMetricFamily] = []
        utils = self

        class MetricFamily(FakeMetricFamily):
            def __init__(self, name: str, description: str, kind: int) -> None:
                super().__init__(name, description, kind)
                utils.families.append(self)

        self.MetricFamily = MetricFamily


class FakeSender:
    """Refuses what Triton refuses or crashes on: any use after the response with the FINAL flag."""

    def __init__(self) -> None:
        self.responses: list[FakeResponse] = []
        self.finals = 0
        self.cancelled = False
        self.broken = False
        self.misuse: list[str] = []
        self.done = threading.Event()
        self.threads: set[str] = set()

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        self.threads.add(threading.current_thread().name)
        if self.finals:
            self.misuse.append("send after FINAL")
        if self.broken and not flags:
            raise RuntimeError("the server takes no response")
        if response is not None:
            self.responses.append(response)
        if flags & FakeUtils.TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self.finals += 1
            self.done.set()

    def is_cancelled(self) -> bool:
        if self.finals:
            self.misuse.append("is_cancelled after FINAL")
        return self.cancelled

    def wait(self) -> FakeSender:
        assert self.done.wait(10), "no final response"
        assert self.finals == 1
        assert self.misuse == []
        return self

    @property
    def error(self) -> FakeTritonError | None:
        return self.responses[-1].error if self.responses else None


class FakeRequest:
    def __init__(
        self, request_id: str = "", parameters: dict[str, Any] | None = None, timeout: int = 0, **inputs: Any
    ) -> None:
        self._id, self._parameters, self._timeout = request_id, parameters or {}, timeout
        self._inputs = [FakeTensor(name, as_array(value)) for name, value in inputs.items()]
        self.sender = FakeSender()

    def request_id(self) -> str:
        return self._id

    def inputs(self) -> list[FakeTensor]:
        return self._inputs

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def timeout(self) -> int:
        return self._timeout

    def get_response_sender(self) -> FakeSender:
        return self.sender


def as_array(value: Any) -> np.ndarray:
    """A tensor as Triton hands it over: strings are bytes objects."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, bool):
        return np.array([value])
    if isinstance(value, list):
        return np.array(value, dtype=np.int32)
    return np.array([value if isinstance(value, bytes) else str(value).encode()], dtype=np.object_)


@dataclass
class ScriptedEngine:
    """Generates `tokens` outputs of one token each; waits for `gate` before each when there is one."""

    tokens: int = 3
    gate: asyncio.Event | None = None
    failure: Exception | None = None
    health_report: dict[str, Any] = field(default_factory=lambda: {"ready": True, "state": "ready"})
    requests: list[GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    profiled: list[str] = field(default_factory=list)
    stopped: bool = False

    async def start(self) -> None:
        pass

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        for number in range(self.tokens):
            if self.gate is not None:
                await self.gate.wait()
            last = number == self.tokens - 1
            yield RequestOutput(
                request_id=request.request_id,
                token_ids=[number],
                text=f"t{number} ",
                num_prompt_tokens=4,
                finish_reason=FinishReason.LENGTH if last else None,
                usage=Usage(prompt_tokens=4, completion_tokens=self.tokens) if last else None,
            )
            await asyncio.sleep(0)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def stats(self) -> dict[str, Any]:
        return {"requests_running": 1}

    async def health(self) -> dict[str, Any]:
        return self.health_report

    def take_observations(self) -> list[tuple[str, float]]:
        return []

    async def profile(self, action: str) -> None:
        self.profiled.append(action)

    async def stop(self) -> None:
        self.stopped = True
