"""Fault hooks for tests, set by environment variables; without them nothing happens.

`DSV4_FAULT_CRASH_AT_STEP=N` ends the process without a word at step N, `DSV4_FAULT_HANG_AT_STEP=N` stops making
progress there, `DSV4_FAULT_SLOW_STEP=SECONDS` delays each step, `DSV4_FAULT_START=TEXT` fails the start with that
reason.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from dsv4.errors import EngineStartError

CRASH_EXIT_CODE = 86


@dataclass
class Faults:
    """Faults of one engine process."""

    crash_at_step: int | None = None
    hang_at_step: int | None = None
    slow_step: float = 0.0
    start: str | None = None
    steps: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Faults:
        def number(name: str) -> int | None:
            value = environment.get(name)
            return int(value) if value else None

        return cls(
            crash_at_step=number("DSV4_FAULT_CRASH_AT_STEP"),
            hang_at_step=number("DSV4_FAULT_HANG_AT_STEP"),
            slow_step=float(environment.get("DSV4_FAULT_SLOW_STEP") or 0.0),
            start=environment.get("DSV4_FAULT_START"),
        )

    def on_start(self) -> None:
        if self.start:
            raise EngineStartError(self.start)

    def before_step(self) -> None:
        self.steps += 1
        if self.slow_step:
            time.sleep(self.slow_step)
        if self.steps == self.crash_at_step:
            os._exit(CRASH_EXIT_CODE)
        if self.steps == self.hang_at_step:
            while True:
                time.sleep(3600)
