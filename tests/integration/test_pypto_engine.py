"""The PyPTO engine in its engine process, behind the client that Triton's model uses: results, ends, faults.

Runs against upstream where `PYPTO_SERVING_ROOT` and `PYPTO_FAKE_EXECUTOR` are set, else against the contract double.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from dsv4.config import EngineConfig
from dsv4.engine.client import EngineClient
from dsv4.engine.protocol import FinishReason, GenerateRequest, RequestOutput
from dsv4.errors import EngineStartError, ErrorCode, RequestError
from dsv4.sampling_parameters import SamplingParameters

from tests.pypto.checkpoint import FIRST_BYTE, write_checkpoint
from tests.pypto.contract import Contract, contract_under_test

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]
CONTEXT = 1024
WAIT_SECONDS = 180.0

EngineFactory = Callable[..., Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("pypto") / "dsv4")


@pytest.fixture(scope="module")
def contract() -> Contract:
    return contract_under_test()


@asynccontextmanager
async def running_engine(
    contract: Contract, checkpoint: Path, drafts: int, flags: dict[str, Any], faults: dict[str, object]
) -> AsyncIterator[EngineClient]:
    """An engine process with faults of its worker; the environment is ours again afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**contract.environment, **contract.faults(**faults)}.items():
            patch.setenv(name, value)
        patch.setenv("DSV4_CACHE_DIR", str(checkpoint.parent / "cache"))
        client = EngineClient(configuration(checkpoint, drafts, **flags))
        try:
            await client.start()
            yield client
        finally:
            await client.stop(0.0)


@pytest.fixture
def engine(contract: Contract, checkpoint: Path) -> EngineFactory:
    """`async with engine(drafts, EXIT_AT=5) as client` starts one with faults."""
    return lambda drafts=1, flags=None, **faults: running_engine(contract, checkpoint, drafts, flags or {}, faults)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(contract: Contract, checkpoint: Path) -> AsyncIterator[EngineClient]:
    """One engine with one draft and steps of 10 ms, for tests that leave it as it was."""
    async with running_engine(contract, checkpoint, 1, {}, {"DECODE_MS": 10}) as client:
        yield client


def configuration(checkpoint: Path, drafts: int, **flags: Any) -> EngineConfig:
    speculation = {"speculative_config": {"method": "mtp", "num_speculative_tokens": drafts}} if drafts else {}
    values = {
        "model": str(checkpoint),
        "backend": "npu",
        "platform": "a2a3",
        "devices": "0,1,2,3,4,5,6,7",
        "dp": 8,
        "max_model_len": CONTEXT,
        "max_num_seqs": 64 if drafts <= 1 else 32,
        "max_num_batched_tokens": 4096,
        "long_prefill_token_threshold": 128,
        "enable_prefix_caching": False,
        **speculation,
        **flags,
    }
    return EngineConfig.build(environment={}, overrides=values)


@dataclass
class Answer:
    """All outputs of a request, joined."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    steps: int = 0
    last: RequestOutput | None = None

    @property
    def error(self) -> ErrorCode | None:
        return None if self.last is None or self.last.error is None else RequestError.parse(self.last.error).code


def prompt(number: int, length: int | None = None) -> list[int]:
    size = 20 + number * 5 if length is None else length
    return [FIRST_BYTE + (number * 31 + position * 17) % 200 for position in range(size)]


async def ask(client: EngineClient, number: int, ids: list[int] | None = None, **parameters: Any) -> Answer:
    answer = Answer()
    request = GenerateRequest(
        request_id=f"client-{number}",
        prompt_token_ids=prompt(number) if ids is None else ids,
        sampling_parameters=SamplingParameters(**{"max_tokens": 24, **parameters}),
    )
    async for output in client.generate(request):
        answer.ids += output.token_ids
        answer.text += output.text
        answer.steps += 1
        answer.last = output
    return answer


async def eventually(observe: Callable[[], Any], accept: Callable[[Any], bool]) -> Any:
    last: Any = None
    for _ in range(int(WAIT_SECONDS / 0.1)):
        last = observe()
        if asyncio.iscoroutine(last):
            last = await last
        if accept(last):
            return last
        await asyncio.sleep(0.1)
    pytest.fail(f"never seen; last: {last}")


def worker_of(client: EngineClient) -> psutil.Process:
    """The device worker: the descendant of the engine process that multiprocessing spawned with queues."""
    engine_process = psutil.Process(engine_pid(client))
    workers = [p for p in engine_process.children() if any("spawn_main" in part for part in p.cmdline())]
    assert len(workers) == 1, workers
    return workers[0]


def engine_pid(client: EngineClient) -> int:
    child = client._child
    assert child is not None
    assert child.pid is not None
    return child.pid


@pytest.mark.parametrize("drafts", [0, 3])
async def test_64_requests_at_once_get_the_right_tokens(engine: EngineFactory, contract: Contract, drafts: int) -> None:
    async with engine(drafts) as client:
        await check_64_requests(client, contract)


async def test_64_requests_at_once_with_one_draft(shared: EngineClient, contract: Contract) -> None:
    await check_64_requests(shared, contract)


async def check_64_requests(client: EngineClient, contract: Contract) -> None:
    answers = await asyncio.gather(*(ask(client, number, max_tokens=24 + number % 9) for number in range(64)))
    for number, answer in enumerate(answers):
        assert answer.last is not None
        assert answer.last.error is None
        assert answer.ids == contract.reference(prompt(number), 24 + number % 9)
        assert answer.text == bytes(token - FIRST_BYTE for token in answer.ids).decode()
        assert answer.last.finish_reason is FinishReason.LENGTH
        assert answer.last.usage is not None
        assert answer.last.usage.completion_tokens == 24 + number % 9
    assert max(answer.steps for answer in answers) > 5, "not streamed"
    stats = await client.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["kv_cache_usage"] == 0.0


async def test_ends_are_found_token_by_token(engine: EngineFactory, contract: Contract) -> None:
    """Stop strings, stop tokens and the end of a sentence, each inside a speculative step somewhere."""
    async with engine(3, EOS_MOD=23) as client:
        for number in range(6):
            whole = contract.reference(prompt(number), 200, ignore_eos=True)
            text = bytes(max(0, token - FIRST_BYTE) for token in whole).decode("latin-1")
            cut = whole.index(1) if 1 in whole else len(whole)
            natural = await ask(client, number, max_tokens=200)
            assert natural.ids == whole[: cut + 1][:200]
            stop = text[7:9]
            first = text.index(stop)
            stopped = await ask(client, number, max_tokens=200, stop=[stop], ignore_eos=True)
            assert stopped.text == text[:first].replace("\0", "")
            assert stopped.last is not None
            assert (stopped.last.finish_reason, stopped.last.stop_reason) == (FinishReason.STOP, stop)
            token = whole[11]
            by_token = await ask(client, number, max_tokens=200, stop_token_ids=[token], ignore_eos=True)
            assert by_token.ids == whole[: whole.index(token) + 1]
            assert by_token.last is not None
            assert by_token.last.stop_reason == token


async def test_what_upstream_cannot_do_is_refused_and_harms_nobody(shared: EngineClient, contract: Contract) -> None:
    good = asyncio.create_task(ask(shared, 0, max_tokens=200))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 0.8}, "temperature"),
        ({"logprobs": 2}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
    ]
    for number, (parameters, name) in enumerate(refused, 1):
        answer = await ask(shared, number, **parameters)
        assert answer.error is ErrorCode.UNSUPPORTED
        assert answer.last is not None
        assert f"] {name}:" in str(answer.last.error)
    for number, ids in enumerate(([], [-1, 5], [5, 999_999], prompt(0, CONTEXT)), 20):
        assert (await ask(shared, number, ids=ids)).error is ErrorCode.INVALID_ARGUMENT
    assert (await good).ids == contract.reference(prompt(0), 200)


async def test_a_request_up_to_the_end_of_the_context(engine: EngineFactory, contract: Contract) -> None:
    """Neighbours of a request at its limit keep their right tokens."""
    async with engine(3) as client:
        ids = prompt(1, CONTEXT - 60)
        answers = await asyncio.gather(
            ask(client, 1, ids=ids, max_tokens=None), *(ask(client, number, max_tokens=120) for number in range(2, 12))
        )
        assert 40 <= len(answers[0].ids) < 60
        assert answers[0].ids == contract.reference(ids, len(answers[0].ids))
        for number, answer in enumerate(answers[1:], 2):
            assert answer.ids == contract.reference(prompt(number), 120)


async def test_requests_with_one_prefix_do_not_overfill_a_rank(engine: EngineFactory, contract: Contract) -> None:
    """With prefix caching all of them go to the rank that has the prefix, which decodes eight at once."""
    common = prompt(3, 300)
    prompts = [common + prompt(number, 10) for number in range(24)]
    async with engine(1, {"enable_prefix_caching": True}) as client:
        assert (await ask(client, 99, ids=prompts[0])).ids == contract.reference(prompts[0], 24)
        answers = await asyncio.gather(*(ask(client, number, ids=ids) for number, ids in enumerate(prompts)))
    assert [answer.ids for answer in answers] == [contract.reference(ids, 24) for ids in prompts]


async def test_leaving_a_stream_ends_its_request(shared: EngineClient, contract: Contract) -> None:
    other = asyncio.create_task(ask(shared, 0, max_tokens=150))
    request = GenerateRequest(
        request_id="left",
        prompt_token_ids=prompt(1),
        sampling_parameters=SamplingParameters(max_tokens=900),
    )
    stream = shared.generate(request)
    async for output in stream:
        if output.token_ids:
            break
    await stream.aclose()
    await eventually(shared.stats, lambda stats: stats["running"] == 1 and stats["waiting"] == 0)
    assert (await other).ids == contract.reference(prompt(0), 150)
    await eventually(shared.stats, lambda stats: stats["running"] == 0 and stats["kv_cache_usage"] == 0.0)


async def test_a_deadline_ends_a_request(shared: EngineClient) -> None:
    request = GenerateRequest(
        request_id="late",
        prompt_token_ids=prompt(1),
        sampling_parameters=SamplingParameters(max_tokens=900),
        timeout_seconds=0.5,
    )
    outputs = [output async for output in shared.generate(request)]
    assert RequestError.parse(outputs[-1].error or "").code is ErrorCode.DEADLINE


async def test_a_failed_step_is_a_device_error_and_the_next_request_works(
    engine: EngineFactory, contract: Contract
) -> None:
    async with engine(1, FAIL_AT=4) as client:
        answer = await ask(client, 0)
        assert answer.error is ErrorCode.DEVICE_ERROR
        assert (await ask(client, 1)).ids == contract.reference(prompt(1), 24)


async def test_a_killed_worker_fails_its_requests_and_is_replaced(engine: EngineFactory, contract: Contract) -> None:
    async with engine(1, DECODE_MS=20) as client:
        requests = [asyncio.create_task(ask(client, number, max_tokens=500)) for number in range(8)]
        await eventually(client.stats, lambda stats: stats["running"] == 8)
        dead = worker_of(client)
        os.kill(dead.pid, signal.SIGKILL)
        answers = await asyncio.gather(*requests)
        assert {answer.error for answer in answers} == {ErrorCode.ENGINE_DEAD}
        await eventually(client.health, lambda health: health["ready"] and health["restarts"] == 1)
        assert (await ask(client, 1, max_tokens=24)).ids == contract.reference(prompt(1), 24)
        assert worker_of(client).pid != dead.pid


async def test_a_hanging_worker_is_found_and_replaced(engine: EngineFactory) -> None:
    async with engine(1, {"hang_timeout_seconds": 5.0}, HANG_AT=6, HANG_S=600) as client:
        before = worker_of(client)
        answer = await ask(client, 0, max_tokens=200)
        assert answer.error is ErrorCode.ENGINE_DEAD
        await eventually(client.health, lambda health: health["ready"] and health["restarts"] == 1)
        await eventually(before.is_running, lambda running: not running)


async def test_the_worker_does_not_outlive_a_killed_engine_process(engine: EngineFactory) -> None:
    async with engine(1) as client:
        worker = worker_of(client)
        os.kill(engine_pid(client), signal.SIGKILL)
        await eventually(worker.is_running, lambda running: not running)
        await eventually(client.health, lambda health: health["ready"] and health["restarts"] == 1)


async def test_stopping_lets_running_requests_end(engine: EngineFactory, contract: Contract) -> None:
    async with engine(1, DECODE_MS=10) as client:
        running = asyncio.create_task(ask(client, 0, max_tokens=100))
        await eventually(client.stats, lambda stats: stats["running"] == 1)
        worker = worker_of(client)
        await client.stop(60.0)
        assert (await running).ids == contract.reference(prompt(0), 100)
        await eventually(worker.is_running, lambda running: not running)


@pytest.mark.parametrize(("fault", "text"), [("INIT_FAIL", "could not load"), ("INIT_EXIT", "ended with exit code")])
async def test_a_start_that_fails_says_why(engine: EngineFactory, fault: str, text: str) -> None:
    with pytest.raises(EngineStartError, match=text):
        async with engine(1, **{fault: 1}):
            pass


async def test_a_profile_window_needs_the_flag(shared: EngineClient) -> None:
    with pytest.raises(RequestError) as raised:
        await shared.profile("start")
    assert raised.value.code is ErrorCode.UNSUPPORTED


async def test_a_profile_window_in_the_worker(engine: EngineFactory, tmp_path: Path) -> None:
    async with engine(1, {"profile_output": str(tmp_path / "trace")}) as client:
        await client.profile("start")
        assert (await ask(client, 0)).error is None
        await client.profile("stop")


async def test_offline_generation_with_the_documented_command(contract: Contract, checkpoint: Path) -> None:
    """`dsv4 generate` with the flags of the offline example, in a process of its own."""
    command = [sys.executable, "-m", "dsv4.cli.main", "generate", "--model", str(checkpoint), "--prompt", "Huawei is"]
    command += [
        "--prompt",
        "And",
        "--backend",
        "npu",
        "--platform",
        "a2a3",
        "--devices",
        "0,1,2,3,4,5,6,7",
        "--dp",
        "8",
        "--ep",
        "8",
        "--tp",
        "1",
    ]
    command += ["--block-size", "128", "--max-model-len", "512", "--long-prefill-token-threshold", "2048"]
    command += ["--ring-dep-pool", "131072", "--ring-task-window", "131072", "--ring-heap", "2147483648"]
    command += ["--generate-config", '{"max_new_tokens": 20}']
    command += ["--speculative-config", '{"method":"mtp","num_speculative_tokens":1}']
    environment = {**os.environ, **contract.environment, "DSV4_CACHE_DIR": str(checkpoint.parent / "cache")}
    done = await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    for text in ("Huawei is", "And"):
        expected = contract.reference([FIRST_BYTE + byte for byte in text.encode()], 20)
        assert text + bytes(token - FIRST_BYTE for token in expected).decode() in done.stdout
