"""Publishing the engine's counters on Triton's metrics endpoint: Triton's own metrics are blind to decoupled models."""

from __future__ import annotations


class MetricsPublisher:
    pass
