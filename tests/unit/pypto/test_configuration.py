"""Flags to upstream's parser, environment, limits of requests, admission, watchdog: everything without a process."""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dsv4.config import EngineConfig
from dsv4.errors import ConfigurationError, EngineStartError, ErrorCode, RequestError
from dsv4.pypto.admission import Admission, live_request_limit
from dsv4.pypto.arguments import upstream_arguments
from dsv4.pypto.environment import upstream_environment
from dsv4.pypto.failures import LastError, Watchdog
from dsv4.pypto.options import PyptoOptions, read_speculation
from dsv4.pypto.requests import Limits, check_prompt, check_sampling, context_limit, generate_fields, new_token_limit
from dsv4.pypto.requirements import check_devices, options_of
from dsv4.sampling_parameters import SamplingParameters

from tests.pypto.checkpoint import write_checkpoint
from tests.unit.doctor.fake_machine import FakeMachine, sound_npu_machine

SERVING_FLAGS: dict[str, Any] = {
    "platform": "a2a3",
    "devices": "0,1,2,3,4,5,6,7",
    "dp": 8,
    "ep": 8,
    "tp": 1,
    "block_size": 128,
    "max_model_len": 512,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "long_prefill_token_threshold": 2048,
    "speculative_config": '{"method":"mtp","num_speculative_tokens":3}',
    "enable_prefix_caching": False,
    "ring_dep_pool": 131072,
    "ring_task_window": 131072,
    "ring_heap": 2147483648,
}


def parser_with(*options: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    for option in ("--model", *options):
        parser.add_argument(option)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    return parser


ALL = tuple("--" + name.replace("_", "-") for name in SERVING_FLAGS if name != "enable_prefix_caching")


def test_every_flag_of_the_serving_command_reaches_upstream_unchanged() -> None:
    arguments = upstream_arguments(PyptoOptions("/m", SERVING_FLAGS), parser_with(*ALL))
    given = dict(zip(arguments[::2], arguments[1::2], strict=False))
    assert given["--model"] == "/m"
    for name, value in SERVING_FLAGS.items():
        if name != "enable_prefix_caching":
            assert given["--" + name.replace("_", "-")] == str(value)
    assert arguments[-1] == "--no-enable-prefix-caching"


def test_ring_sizes_go_by_the_environment_where_upstream_has_no_flags(tmp_path: Path) -> None:
    options = PyptoOptions("/m", SERVING_FLAGS)
    old = parser_with(*(option for option in ALL if "ring" not in option))
    assert not any("ring" in argument for argument in upstream_arguments(options, old))
    changes = upstream_environment({}, options, ring_flags=False, build_directory=tmp_path)
    assert changes["PTO2_RING_HEAP"] == "2147483648"
    assert changes["PTO2_RING_DEP_POOL"] == changes["PTO2_RING_TASK_WINDOW"] == "131072"
    assert changes["PYPTO_PROG_BUILD_DIR"] == str(tmp_path)
    new = upstream_environment({}, options, ring_flags=True, build_directory=tmp_path)
    assert not any(name.startswith("PTO2_") or name == "PYPTO_PROG_BUILD_DIR" for name in new)


def test_an_unknown_flag_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigurationError, match="--block-size"):
        upstream_arguments(
            PyptoOptions("/m", SERVING_FLAGS), parser_with("--platform", "--devices", "--dp", "--ep", "--tp")
        )


def test_prefix_caching_is_off_unless_asked_for() -> None:
    assert upstream_arguments(PyptoOptions("/m"), parser_with())[-1] == "--no-enable-prefix-caching"
    asked = PyptoOptions("/m", {"enable_prefix_caching": True})
    assert upstream_arguments(asked, parser_with())[-1] == "--enable-prefix-caching"


def test_variables_that_do_harm_are_removed_or_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    environment = {"SA_PROFILE_OUTPUT": "/x", "PYPTO_PROG_BUILD_DIR": "/b"}
    with caplog.at_level(logging.WARNING):
        changes = upstream_environment(environment, PyptoOptions("/m"), ring_flags=True, build_directory=tmp_path)
    assert changes["SA_PROFILE_OUTPUT"] is None
    assert "bypasses the kernel cache" in caplog.text


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ("none", 0)),
        ({"num_speculative_tokens": 2}, ("mtp", 2)),
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, ("mtp", 1)),
        ({"speculative_config": '{"method":"dspark","num_speculative_tokens":7}'}, ("dspark", 7)),
    ],
)
def test_speculation_from_each_flag(flags: dict[str, Any], expected: tuple[str, int]) -> None:
    speculation = read_speculation(flags)
    assert (speculation.method, speculation.draft_tokens) == expected


@pytest.mark.parametrize("value", ["{", "[]", '{"method":"mtp"}', '{"num_speculative_tokens":true}'])
def test_wrong_speculation_is_named(value: str) -> None:
    with pytest.raises(ConfigurationError, match="--speculative-config"):
        read_speculation({"speculative_config": value})


def limits(drafts: int = 0, **changes: Any) -> Limits:
    flags = {"num_speculative_tokens": drafts, "max_model_len": 128}
    values = {
        "context": context_limit(PyptoOptions("/m", flags)),
        "vocabulary": 100,
        "speculation": read_speculation(flags),
        "seeded_sampling": False,
        **changes,
    }
    return Limits(**values)


@pytest.mark.parametrize(
    ("parameters", "drafts", "field"),
    [
        ({"temperature": 0.5}, 1, "temperature"),
        ({"temperature": 0.5, "seed": 1}, 0, "seed"),
        ({"temperature": 0.5, "min_p": 0.1}, 0, "min_p"),
        ({"logprobs": 0}, 0, "logprobs"),
        ({"prompt_logprobs": 1}, 0, "prompt_logprobs"),
        ({"presence_penalty": 1.0}, 0, "presence_penalty"),
        ({"frequency_penalty": 1.0}, 0, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, 0, "repetition_penalty"),
        ({"logit_bias": {"1": 2.0}}, 0, "logit_bias"),
        ({"min_tokens": 1}, 0, "min_tokens"),
        ({"structured_outputs": {}}, 0, "structured_outputs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(parameters: dict[str, Any], drafts: int, field: str) -> None:
    with pytest.raises(RequestError) as raised:
        check_sampling(SamplingParameters(**parameters), limits(drafts))
    assert (raised.value.code, raised.value.field) == (ErrorCode.UNSUPPORTED, field)


def test_what_can_be_done_passes() -> None:
    check_sampling(SamplingParameters(temperature=0.5, top_p=0.9, top_k=5), limits(0))
    check_sampling(SamplingParameters(seed=3, stop=["x"], stop_token_ids=[5], min_p=0.1), limits(3))
    check_sampling(SamplingParameters(temperature=0.5, seed=3), limits(0, seeded_sampling=True))


def test_fields_that_upstream_lacks_are_left_out() -> None:
    parameters = SamplingParameters(temperature=0.5, seed=3, stop=["x"], top_k=0)
    old = generate_fields(parameters, 7, frozenset({"max_new_tokens", "temperature", "stop", "stream", "top_k"}))
    assert old == {"max_new_tokens": 7, "temperature": 0.5, "stop": (), "stream": True, "top_k": None}
    assert generate_fields(parameters, 7, frozenset({"seed"})) == {"seed": 3}


@pytest.mark.parametrize("ids", [[], [100], [-1], list(range(99)) + [1] * 28])
def test_prompts_that_upstream_would_choke_on(ids: list[int]) -> None:
    with pytest.raises(RequestError) as raised:
        check_prompt(ids, limits(1))
    assert raised.value.code is ErrorCode.INVALID_ARGUMENT


def test_no_request_comes_so_near_to_the_end_that_neighbours_suffer() -> None:
    three = limits(3)
    assert three.context == 128 - 2 * 4
    assert new_token_limit(SamplingParameters(), 100, three) == 20
    assert new_token_limit(SamplingParameters(max_tokens=5), 100, three) == 5


@pytest.mark.parametrize(
    ("flags", "slots", "expected"),
    [
        ({"max_num_seqs": 64}, None, 64),
        ({"max_num_seqs": 64, "num_speculative_tokens": 3}, 24, 32),
        ({"max_num_seqs": 64, "num_speculative_tokens": 5}, 24, 16),
        ({"max_num_seqs": 64}, 3, 24),
        ({"max_num_seqs": 10}, None, 10),
        ({"max_num_seqs": 64, "enable_prefix_caching": True}, None, 8),
        ({"max_num_seqs": 32, "enable_prefix_caching": True, "num_speculative_tokens": 3}, None, 32),
        ({"max_num_seqs": 64}, 0, 8),
    ],
)
def test_live_requests_never_overfill_a_rank(flags: dict[str, Any], slots: int | None, expected: int) -> None:
    assert live_request_limit(PyptoOptions("/m", flags), ranks=8, slots_per_rank=slots) == expected


async def test_admission_keeps_order_priority_and_bound() -> None:
    admission = Admission(1, 3)
    order: list[str] = []
    gate = asyncio.Event()

    async def request(name: str, priority: int) -> None:
        async with admission.place(priority):
            order.append(name)
            await gate.wait()

    tasks = []
    for name, priority in (("first", 0), ("low", 5), ("high", -1), ("cancelled", -2)):
        tasks.append(asyncio.create_task(request(name, priority)))
        await asyncio.sleep(0)
    assert admission.num_waiting == 3
    with pytest.raises(RequestError) as raised:
        await request("too many", 0)
    assert raised.value.code is ErrorCode.QUEUE_FULL
    tasks[3].cancel()
    await asyncio.sleep(0)
    assert admission.num_waiting == 2
    gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["first", "high", "low"]
    assert admission.num_waiting == 0
    async with admission.place(0):
        pass


def test_a_device_error_keeps_its_number() -> None:
    now = [0.0]
    last = LastError(lambda: now[0])
    last.emit(logging.makeLogRecord({"msg": "Worker returned error: rtStreamSync failed,\n code 507034 on 3"}))
    error = last.as_request_error()
    assert (error.code, error.detail) == (ErrorCode.DEVICE_ERROR, 507034)
    assert str(error).startswith("[DEVICE_ERROR 507034] a step failed on the device: Worker returned error")
    now[0] = 60.0
    assert last.as_request_error().detail is None


def core(**changes: Any) -> SimpleNamespace:
    values = {
        "_worker_process": SimpleNamespace(is_alive=lambda: True, exitcode=None),
        "_loop_task": None,
        "_batch_queue": [1],
        "_step_counter": 5,
        "scheduler": SimpleNamespace(has_work=lambda: True),
    }
    return SimpleNamespace(**{**values, **changes})


def test_the_watchdog_tells_slow_from_stuck() -> None:
    now = [0.0]
    watched = core()
    watchdog = Watchdog(watched, 10.0, lambda: now[0])
    assert watchdog.reason() is None
    now[0] = 9.0
    watched._step_counter = 6
    assert watchdog.reason() is None
    now[0] = 18.9
    assert watchdog.reason() is None
    now[0] = 19.1
    assert "no step" in (watchdog.reason() or "")
    watched.scheduler.has_work = lambda: False
    assert watchdog.reason() is None
    assert watchdog.step_age() == 0.0


def test_the_watchdog_sees_a_dead_worker() -> None:
    dead = core(_worker_process=SimpleNamespace(is_alive=lambda: False, exitcode=-9))
    assert "exit code -9" in (Watchdog(dead, 10.0).reason() or "")


async def test_the_watchdog_sees_a_dead_loop() -> None:
    async def fail() -> None:
        raise KeyError("duplicate")

    task = asyncio.create_task(fail())
    await asyncio.wait([task])
    assert "duplicate" in (Watchdog(core(_loop_task=task), 10.0).reason() or "")


def npu_config(model: Path, **changes: Any) -> EngineConfig:
    values = {"backend": "npu", "model": str(model), **SERVING_FLAGS, **changes}
    return EngineConfig.build(environment={}, overrides=values)


def test_options_follow_the_flags(tmp_path: Path) -> None:
    config = npu_config(write_checkpoint(tmp_path / "m"), hang_timeout_seconds=33.0, memory_utilization=0.8)
    options = options_of(config)
    for name, value in SERVING_FLAGS.items():
        assert options.flags[name] == value
    assert options.flags["npu_memory_utilization"] == 0.8
    assert options.step_timeout_seconds == 33.0
    assert "profile" not in options.flags
    profiled = options_of(npu_config(tmp_path / "m", profile_output="/t"))
    assert (profiled.flags["profile"], profiled.flags["profile_output"]) == (True, "/t")


def test_without_npus_there_is_one_reason(tmp_path: Path) -> None:
    config = npu_config(tmp_path)
    with pytest.raises(EngineStartError, match="this machine has no Ascend NPU"):
        check_devices(config, FakeMachine())
    machine = sound_npu_machine()
    check_devices(config, machine)
    del machine.files["/dev/davinci3"]
    with pytest.raises(EngineStartError, match="/dev/davinci3 missing"):
        check_devices(config, machine)
    machine.files["/dev/davinci3"] = ""
    machine.denied = {"/dev/davinci3"}
    with pytest.raises(EngineStartError, match="may not open"):
        check_devices(config, machine)
