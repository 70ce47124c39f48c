"""The life of requests between Triton and the engine: exactly one FINAL each, whatever happens."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from dsv4.engine.protocol import RequestOutput
from dsv4.errors import EngineStartError, ErrorCode, RequestError
from dsv4.triton.request import OutputOptions
from dsv4.triton.responses import ResponseBuilder
from dsv4.triton.sender import MAX_UNSENT_OUTPUTS, ResponseSenderThread
from dsv4.triton.service import EngineService

from tests.unit.triton.fakes import FakeRequest, FakeSender, FakeTritonError, FakeUtils, ScriptedEngine

MakeService = Callable[..., EngineService]


@pytest.fixture
def make_service() -> Iterator[MakeService]:
    services: list[EngineService] = []

    def make(engine: ScriptedEngine, *, gated: bool = False, **options: Any) -> EngineService:
        def make_engine() -> ScriptedEngine:
            if gated:
                engine.gate = asyncio.Event()
            return engine

        service = EngineService(FakeUtils(), make_engine, **options)
        service.start(10)
        services.append(service)
        return service

    yield make
    for service in services:
        service.stop(5)


def run(service: EngineService, *requests: FakeRequest) -> list[FakeSender]:
    service.execute(requests)
    return [request.sender.wait() for request in requests]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def control(service: EngineService, command: str, **parameters: str) -> dict[str, Any]:
    [sender] = run(service, FakeRequest(parameters={"control": command, **parameters}))
    return json.loads(sender.responses[0].text())


def text_of(sender: FakeSender) -> str:
    return "".join(response.text() for response in sender.responses)


def test_not_streamed_is_one_response(make_service: MakeService) -> None:
    [sender] = run(make_service(ScriptedEngine(tokens=5)), FakeRequest(text_input="p: ", return_num_output_tokens=True))
    assert len(sender.responses) == 1
    assert text_of(sender) == "p: t0 t1 t2 t3 t4 "
    assert sender.responses[0].tensors["num_output_tokens"].tolist() == [5]


def test_streamed_text_is_the_same(make_service: MakeService) -> None:
    requests = [FakeRequest(text_input="p", stream=True, return_token_ids=True) for _ in range(20)]
    for sender in run(make_service(ScriptedEngine(tokens=30)), *requests):
        assert text_of(sender) == "".join(f"t{number} " for number in range(30))
        assert [i for response in sender.responses for i in response.tensors["token_ids"]] == list(range(30))
        assert sender.threads == {"triton-sender"}


def test_one_bad_request_does_not_touch_the_others(make_service: MakeService) -> None:
    engine = ScriptedEngine()
    good, bad = run(make_service(engine), FakeRequest(text_input="p"), FakeRequest())
    assert good.error is None
    assert bad.error is not None
    assert bad.error.triton_code == FakeTritonError.INVALID_ARG
    assert len(engine.requests) == 1


def test_same_client_id_twice_is_two_requests(make_service: MakeService) -> None:
    engine = ScriptedEngine()
    run(make_service(engine), *(FakeRequest(text_input="p", request_id="same") for _ in range(2)))
    assert len({request.request_id for request in engine.requests}) == 2


def test_cancellation_before_the_first_token(make_service: MakeService) -> None:
    engine = ScriptedEngine()
    service = make_service(engine, gated=True)
    request = FakeRequest(text_input="p", stream=True)
    service.execute([request])
    wait_for(lambda: len(engine.requests) == 1)
    request.sender.cancelled = True
    error = request.sender.wait().error
    assert error is not None
    assert error.text.startswith("[ABORTED]")
    assert error.triton_code == FakeTritonError.CANCELLED
    assert engine.aborted == [engine.requests[0].request_id]


def test_abort_by_id_is_idempotent(make_service: MakeService) -> None:
    engine = ScriptedEngine()
    service = make_service(engine, gated=True)
    requests = [FakeRequest(text_input="p", request_id=name) for name in ("a", "a", "b")]
    service.execute(requests)
    wait_for(lambda: len(engine.requests) == 3)
    assert control(service, "abort", abort_request_id="a") == {"aborted": 2}
    for request in requests[:2]:
        error = request.sender.wait().error
        assert error is not None
        assert error.text.startswith("[ABORTED]")
    assert control(service, "abort", abort_request_id="a") == {"aborted": 0}
    assert control(service, "abort", abort_request_id="unknown") == {"aborted": 0}
    assert not requests[2].sender.done.is_set()


def test_abort_right_after_the_request(make_service: MakeService) -> None:
    service = make_service(ScriptedEngine(), gated=True)
    for number in range(50):
        request = FakeRequest(text_input="p", request_id=f"q{number}")
        abort = FakeRequest(parameters={"control": "abort", "abort_request_id": f"q{number}"})
        service.execute([request, abort])
        abort.sender.wait()
        error = request.sender.wait().error
        assert error is not None
        assert error.text.startswith("[ABORTED]")


def test_other_control_requests(make_service: MakeService) -> None:
    engine = ScriptedEngine()
    service = make_service(engine)
    assert control(service, "health") == {"ready": True, "state": "ready", "draining": False}
    assert control(service, "stats") == {"requests_running": 1}
    assert control(service, "start_profile") == {"profiling": True}
    assert control(service, "stop_profile") == {"profiling": False}
    assert engine.profiled == ["start", "stop"]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (RequestError(ErrorCode.QUEUE_FULL, "8 requests wait"), "[QUEUE_FULL] 8 requests wait"),
        (ValueError("/secret/path"), "[INTERNAL] the request failed; the server's log has the reason"),
    ],
)
def test_engine_errors_are_coded_and_say_nothing_private(
    make_service: MakeService, failure: Exception, message: str
) -> None:
    [sender] = run(make_service(ScriptedEngine(failure=failure)), FakeRequest(text_input="p"))
    assert sender.error is not None
    assert sender.error.text == message


def test_engine_that_ends_without_a_result(make_service: MakeService) -> None:
    [sender] = run(make_service(ScriptedEngine(tokens=0)), FakeRequest(text_input="p"))
    assert sender.error is not None
    assert sender.error.text.startswith("[INTERNAL]")


def test_send_failure_ends_the_request(make_service: MakeService) -> None:
    engine = ScriptedEngine(tokens=10_000)
    service = make_service(engine)
    request = FakeRequest(text_input="p", stream=True)
    request.sender.broken = True
    service.execute([request])
    request.sender.wait()
    wait_for(lambda: engine.aborted == [engine.requests[0].request_id])


def test_stop_ends_live_requests_and_refuses_new_ones(make_service: MakeService) -> None:
    engine = ScriptedEngine()
    service = make_service(engine, gated=True)
    request = FakeRequest(text_input="p")
    service.execute([request])
    wait_for(lambda: len(engine.requests) == 1)
    service._draining = True
    [refused] = run(service, FakeRequest(text_input="q"))
    assert refused.error is not None
    assert refused.error.text.startswith("[DRAINING]")
    service.stop(5)
    assert request.sender.wait().error is not None
    assert engine.stopped


def test_start_failure_is_raised_with_the_engines_reason() -> None:
    class Failing(ScriptedEngine):
        async def start(self) -> None:
            raise EngineStartError("no such checkpoint")

    with pytest.raises(EngineStartError, match="no such checkpoint"):
        EngineService(FakeUtils(), Failing).start(10)


def test_readiness_is_the_engines(make_service: MakeService) -> None:
    engine = ScriptedEngine()
    service = make_service(engine)
    assert service.is_ready()
    engine.health_report = {"ready": False, "state": "restarting"}
    assert not service.is_ready()
    engine.health_report = {"ready": True}
    service._draining = True
    assert not service.is_ready()


def test_server_is_ended_when_the_engine_gives_up(make_service: MakeService) -> None:
    ended = threading.Event()
    report = {"ready": False, "state": "failed", "reason": "died 3 times"}
    make_service(ScriptedEngine(health_report=report), end_server=ended.set)
    assert ended.wait(10)


def test_a_finished_exchange_takes_nothing_more() -> None:
    sender = ResponseSenderThread(FakeUtils(), lambda request_id: None)
    exchange = sender.open("r", FakeSender(), ResponseBuilder(FakeUtils(), OutputOptions()))
    sender.end(exchange, RequestError(ErrorCode.ABORTED, "first"))
    sender.end(exchange, RequestError(ErrorCode.ABORTED, "second"))
    with pytest.raises(RuntimeError, match="already ended"):
        sender.put(exchange, RequestOutput(request_id="r"))
    with pytest.raises(ValueError, match="already open"):
        sender.open("r", FakeSender(), ResponseBuilder(FakeUtils(), OutputOptions()))


def test_unread_output_is_bounded() -> None:
    sender = ResponseSenderThread(FakeUtils(), lambda request_id: None)
    exchange = sender.open("r", FakeSender(), ResponseBuilder(FakeUtils(), OutputOptions(stream=True)))
    for _ in range(MAX_UNSENT_OUTPUTS):
        sender.put(exchange, RequestOutput(request_id="r", text="x"))
    with pytest.raises(RequestError, match="unread"):
        sender.put(exchange, RequestOutput(request_id="r", text="x"))
    sender.end(exchange, RequestError(ErrorCode.ABORTED, "unread"))
    sender.start()
    assert sender.wait_idle(5)
    assert sender.stop(5)
