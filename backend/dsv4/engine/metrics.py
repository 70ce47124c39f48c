"""Every metric of the engine in one table, and the recorder that the step loop writes to."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
"""Seconds. Reasoning answers take minutes, so the buckets reach ten of them."""


@dataclass(frozen=True)
class Metric:
    """Name, kind (`gauge`, `counter` or `histogram`), help text and label names."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()


METRICS = (
    Metric("dsv4_requests_waiting", "gauge", "Requests in the queue."),
    Metric("dsv4_requests_running", "gauge", "Requests that run."),
    Metric("dsv4_kv_cache_usage_ratio", "gauge", "Used share of the fullest cache group, 0 to 1."),
    Metric(
        "dsv4_kv_cache_blocks", "gauge", "Blocks of a cache group by state (total, free, cached).", ("group", "state")
    ),
    Metric("dsv4_kv_block_tokens", "gauge", "Tokens per block of the main cache groups."),
    Metric("dsv4_engine_up", "gauge", "1 while the engine takes requests."),
    Metric("dsv4_last_step_age_seconds", "gauge", "Age of the last finished step while requests run, else 0."),
    Metric("dsv4_process_rss_bytes", "gauge", "Resident memory of the engine process."),
    Metric("dsv4_prompt_tokens_total", "counter", "Prompt tokens of finished requests."),
    Metric("dsv4_generation_tokens_total", "counter", "Tokens sent to clients."),
    Metric("dsv4_reasoning_tokens_total", "counter", "Tokens inside reasoning of finished requests."),
    Metric("dsv4_prefix_cache_query_tokens_total", "counter", "Prompt tokens looked up in the prefix cache."),
    Metric("dsv4_prefix_cache_hit_tokens_total", "counter", "Prompt tokens found in the prefix cache."),
    Metric("dsv4_mtp_draft_tokens_total", "counter", "Verified draft tokens by position.", ("position",)),
    Metric("dsv4_mtp_accepted_tokens_total", "counter", "Accepted draft tokens by position.", ("position",)),
    Metric("dsv4_preemptions_total", "counter", "Requests sent back to the queue for lack of cache blocks."),
    Metric("dsv4_steps_total", "counter", "Engine steps."),
    Metric("dsv4_requests_total", "counter", "Ended requests by outcome.", ("outcome",)),
    Metric("dsv4_engine_restarts_total", "counter", "Restarts of the engine process."),
    Metric("dsv4_time_to_first_token_seconds", "histogram", "From submission to the first token."),
    Metric("dsv4_inter_token_seconds", "histogram", "Between the tokens of a request; a step's time is shared evenly."),
    Metric("dsv4_e2e_seconds", "histogram", "From submission to the last token."),
    Metric("dsv4_queue_seconds", "histogram", "From submission to the first scheduled row."),
    Metric("dsv4_step_seconds", "histogram", "Duration of an engine step."),
)

Labels = tuple[str, ...]


class MetricsRecorder:
    """Counters and histogram observations. One thread writes, another may take the observations."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, Labels], float] = defaultdict(float)
        self._observations: deque[tuple[str, float]] = deque()

    def count(self, name: str, amount: float = 1.0, labels: Labels = ()) -> None:
        self._counters[name, labels] += amount

    def observe(self, name: str, value: float) -> None:
        self._observations.append((name, value))

    def counters(self) -> list[tuple[str, Labels, float]]:
        """(name, label values, total since the start of this process)."""
        return [(name, labels, value) for (name, labels), value in self._counters.items()]

    def take_observations(self) -> list[tuple[str, float]]:
        """(histogram, value) since the last call."""
        return [self._observations.popleft() for _ in range(len(self._observations))]
