"""Samples of the engine become metrics; counters survive a restart of the engine."""

from __future__ import annotations

import threading
from typing import Any

from dsv4.engine.metrics import METRICS
from dsv4.triton.metrics import MetricsPublisher, PublisherThread

from tests.unit.triton.fakes import FakeMetric, FakeUtils

HEALTH = {"ready": True, "restarts": 0, "last_step_age_seconds": 0.5}


def stats(**changes: Any) -> dict[str, Any]:
    return {
        "running": 2,
        "waiting": 3,
        "preemptions": 0,
        "kv_cache_usage": 0.25,
        "cache_groups": {"sliding_window": {"total_blocks": 8, "used_blocks": 2}},
        "counters": [],
        **changes,
    }


def metric(utils: FakeUtils, name: str, **labels: str) -> FakeMetric:
    [family] = [family for family in utils.families if family.name == name]
    return family.metrics[tuple(sorted({"model": "m", **labels}.items()))]


def test_every_metric_is_registered_once() -> None:
    utils = FakeUtils()
    MetricsPublisher(utils, {"model": "m"})
    assert [family.name for family in utils.families] == [each.name for each in METRICS]


def test_gauges_and_histograms() -> None:
    utils = FakeUtils()
    publisher = MetricsPublisher(utils, {"model": "m"})
    publisher.publish(HEALTH, stats(), [("dsv4_e2e_seconds", 1.5)])
    assert metric(utils, "dsv4_requests_running").value == 2
    assert metric(utils, "dsv4_requests_waiting").value == 3
    assert metric(utils, "dsv4_engine_up").value == 1
    assert metric(utils, "dsv4_kv_cache_blocks", group="sliding_window", state="free").value == 6
    assert metric(utils, "dsv4_e2e_seconds").observed == [1.5]
    publisher.publish({"ready": False}, None, [])
    assert metric(utils, "dsv4_engine_up").value == 0
    assert metric(utils, "dsv4_requests_running").value == 0


def test_counters_go_on_when_the_engine_begins_again() -> None:
    utils = FakeUtils()
    publisher = MetricsPublisher(utils, {"model": "m"})
    for total in (5.0, 9.0, 2.0):
        counters = [("dsv4_generation_tokens_total", (), total), ("dsv4_mtp_draft_tokens_total", ["1"], total)]
        publisher.publish(HEALTH, stats(counters=counters), [])
    assert metric(utils, "dsv4_generation_tokens_total").value == 11
    assert metric(utils, "dsv4_mtp_draft_tokens_total", position="1").value == 11


def test_a_call_that_never_returns_does_not_hold_up_the_end() -> None:
    release = threading.Event()

    class Stuck(MetricsPublisher):
        def publish(self, *sample: Any) -> None:
            release.wait()

    thread = PublisherThread(Stuck(FakeUtils(), {}))
    thread.start()
    thread.put((HEALTH, None, []))
    assert thread.busy
    thread.stop(timeout=0.05)
    assert thread.busy
    release.set()
    thread.stop(timeout=10)
    assert not thread.busy


def test_outcomes_unknown_to_the_engine_are_added() -> None:
    utils = FakeUtils()
    publisher = MetricsPublisher(utils, {"model": "m"})
    publisher.count_outcome("invalid_argument")
    publisher.count_outcome("invalid_argument")
    publisher.publish(HEALTH, None, [])
    publisher.publish(HEALTH, stats(counters=[("dsv4_requests_total", ("stop",), 4.0)]), [])
    assert metric(utils, "dsv4_requests_total", outcome="invalid_argument").value == 2
    assert metric(utils, "dsv4_requests_total", outcome="stop").value == 4
