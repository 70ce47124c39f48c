"""Numbers of a load run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dsv4_clients.bench.runner import RequestRecord


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a request must keep to count as good; seconds, None: no limit."""

    first_token_seconds: float | None = None
    token_seconds: float | None = None
    request_seconds: float | None = None

    def is_met(self, record: RequestRecord) -> bool:
        """True when the request succeeded within the limits."""
        if record.error is not None or record.first_output is None:
            return False
        measured = (
            (self.first_token_seconds, record.first_output - record.started),
            (self.token_seconds, seconds_per_token(record)),
            (self.request_seconds, record.ended - record.started),
        )
        return all(limit is None or value is None or value <= limit for limit, value in measured)


@dataclass(frozen=True)
class Distribution:
    """Mean, percentiles and maximum of a time, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def seconds_per_token(record: RequestRecord) -> float | None:
    """Mean time of a token after the first one; None when there is only one."""
    if record.first_output is None or record.completion_tokens < 2:
        return None
    return (record.ended - record.first_output) / (record.completion_tokens - 1)


def distribution(seconds: Sequence[float]) -> Distribution | None:
    """Percentiles by the nearest rank; None for no values."""
    if not seconds:
        return None
    ordered = sorted(seconds)

    def percentile(percent: int) -> float:
        return ordered[max(math.ceil(percent / 100 * len(ordered)) - 1, 0)] * 1000

    return Distribution(
        mean=sum(ordered) / len(ordered) * 1000,
        p50=percentile(50),
        p90=percentile(90),
        p95=percentile(95),
        p99=percentile(99),
        max=ordered[-1] * 1000,
    )


def summarize(records: Sequence[RequestRecord], goal: Goal) -> dict[str, Any]:
    """The result of a run as a JSON object. Times are in milliseconds, rates per second of wall clock."""
    good = [record for record in records if record.error is None]
    wall = max((record.ended for record in records), default=0.0) - min(
        (record.started for record in records), default=0.0
    )
    output_tokens = sum(record.completion_tokens for record in good)
    accepted = sum(record.accepted_draft_tokens for record in good)
    drafted = accepted + sum(record.rejected_draft_tokens for record in good)
    times = {
        "time_to_first_token_ms": [r.first_output - r.started for r in good if r.first_output is not None],
        "inter_token_ms": [each for r in good for each in r.intervals],
        "time_per_output_token_ms": [each for r in good if (each := seconds_per_token(r)) is not None],
        "request_ms": [r.ended - r.started for r in good],
    }
    distributions = {name: distribution(values) for name, values in times.items()}
    return {
        "requests": len(records),
        "succeeded": len(good),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "wall_seconds": wall,
        "requests_per_second": len(good) / wall if wall else 0.0,
        "prompt_tokens": sum(record.prompt_tokens for record in good),
        "output_tokens": output_tokens,
        "output_tokens_per_second": output_tokens / wall if wall else 0.0,
        "good_requests_per_second": sum(map(goal.is_met, records)) / wall if wall else 0.0,
        "goal": asdict(goal),
        "draft_acceptance": accepted / drafted if drafted else None,
        **{name: None if each is None else asdict(each) for name, each in distributions.items()},
    }
