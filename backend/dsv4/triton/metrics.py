"""Publishing the engine's metrics on Triton's metrics endpoint: Triton's own are blind to decoupled models."""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import psutil

from dsv4.cache.groups import BLOCK_SIZE
from dsv4.engine.metrics import LATENCY_BUCKETS, METRICS, Metric
from dsv4.triton.api import BackendUtils

Sample = tuple[Mapping[str, Any], Mapping[str, Any] | None, list[tuple[str, float]]]
"""Health, statistics (None without an engine), and observations of histograms: the arguments of `publish`."""

_OUTCOMES = "dsv4_requests_total"
_logger = logging.getLogger(__name__)


class MetricsPublisher:
    """Turns samples of the engine into Triton metrics under the names of `dsv4.engine.metrics.METRICS`.

    Counters of the engine start again at zero with every engine process; published counters go on.
    """

    def __init__(self, api: BackendUtils, labels: Mapping[str, str]) -> None:
        """`labels` are put on every metric, for example model and version."""
        self._labels = dict(labels)
        self._specs = {metric.name: metric for metric in METRICS}
        self._families = {metric.name: _make_family(api, metric) for metric in METRICS}
        self._metrics: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}
        self._outcomes: Counter[str] = Counter()
        self._outcomes_lock = threading.Lock()
        for metric in METRICS:
            if not metric.labels:
                self._metric(metric.name)  # shown as 0 from the start

    def count_outcome(self, outcome: str) -> None:
        """Count a request that ended without the engine's knowledge. Thread-safe; published with the next sample."""
        with self._outcomes_lock:
            self._outcomes[outcome] += 1

    def publish(
        self, health: Mapping[str, Any], stats: Mapping[str, Any] | None, observations: Iterable[tuple[str, float]]
    ) -> None:
        """Publish one sample. `stats` is None while there is no engine to ask."""
        self._set("dsv4_engine_up", float(bool(health.get("ready"))))
        self._set("dsv4_last_step_age_seconds", float(health.get("last_step_age_seconds") or 0.0))
        self._add_total("dsv4_engine_restarts_total", (), float(health.get("restarts") or 0))
        self._publish_outcomes()
        for name, value in observations:
            self._metric(name).observe(value)
        if stats is None:
            self._set("dsv4_requests_running", 0.0)
            self._set("dsv4_requests_waiting", 0.0)
            return
        self._set("dsv4_requests_running", float(stats["running"]))
        self._set("dsv4_requests_waiting", float(stats["waiting"]))
        self._set("dsv4_kv_cache_usage_ratio", float(stats["kv_cache_usage"]))
        self._set("dsv4_kv_block_tokens", float(BLOCK_SIZE))
        self._set("dsv4_process_rss_bytes", float(_resident_bytes(stats.get("pid"))))
        self._add_total("dsv4_preemptions_total", (), float(stats["preemptions"]))
        for group, blocks in stats["cache_groups"].items():
            total, used = blocks["total_blocks"], blocks["used_blocks"]
            self._set("dsv4_kv_cache_blocks", float(total), (group, "total"))
            self._set("dsv4_kv_cache_blocks", float(total - used), (group, "free"))
        for name, label_values, total in stats["counters"]:
            self._add_total(name, tuple(label_values), total)

    def _publish_outcomes(self) -> None:
        with self._outcomes_lock:
            outcomes, self._outcomes = self._outcomes, Counter()
        for outcome, number in outcomes.items():
            self._metric(_OUTCOMES, (outcome,)).increment(float(number))

    def _set(self, name: str, value: float, label_values: tuple[str, ...] = ()) -> None:
        self._metric(name, label_values).set(value)

    def _add_total(self, name: str, label_values: tuple[str, ...], total: float) -> None:
        """Raise a counter by what its source has grown; a smaller total means that the source began again."""
        before = self._totals.get((name, label_values), 0.0)
        self._totals[name, label_values] = total
        growth = total - before if total >= before else total
        if growth > 0:
            self._metric(name, label_values).increment(growth)

    def _metric(self, name: str, label_values: tuple[str, ...] = ()) -> Any:
        key = (name, label_values)
        if key not in self._metrics:
            spec = self._specs[name]
            labels = {**self._labels, **dict(zip(spec.labels, map(str, label_values), strict=True))}
            options = {"buckets": list(LATENCY_BUCKETS)} if spec.kind == "histogram" else {}
            self._metrics[key] = self._families[name].Metric(labels=labels, **options)
        return self._metrics[key]


class PublisherThread:
    """Publishes samples one after the other, away from the event loop: every metric is a call into the server process.

    The thread is a daemon because such a call never returns when the server has begun to unload the model, and the
    interpreter must be able to end nevertheless.
    """

    def __init__(self, publisher: MetricsPublisher) -> None:
        self._publisher = publisher
        self._samples: queue.SimpleQueue[Sample | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    @property
    def busy(self) -> bool:
        """Whether the last sample is still being published."""
        return not self._idle.is_set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, sample: Sample) -> None:
        """Publish a sample soon."""
        self._idle.clear()
        self._samples.put(sample)

    def stop(self, timeout: float) -> None:
        """End the thread after the last sample, or leave it behind after `timeout` seconds."""
        self._samples.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (sample := self._samples.get()) is not None:
            try:
                self._publisher.publish(*sample)
            except Exception:
                _logger.exception("the metrics could not be published")
            self._idle.set()


def _resident_bytes(pid: int | None) -> int:
    """Resident memory of a process; 0 when there is none any more."""
    try:
        return 0 if pid is None else int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _make_family(api: BackendUtils, metric: Metric) -> Any:
    kinds = {
        "gauge": api.MetricFamily.GAUGE,
        "counter": api.MetricFamily.COUNTER,
        "histogram": api.MetricFamily.HISTOGRAM,
    }
    return api.MetricFamily(name=metric.name, description=metric.help, kind=kinds[metric.kind])
