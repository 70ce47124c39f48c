"""What a check reports: one line of fact, how bad it is, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import asdict, dataclass


class Severity(enum.Enum):
    """`ERROR`: serving will not start or will fail. `WARNING`: it is worse than it could be. `OK`: as it should be."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: stable dotted name for scripts, such as `npu.health`.
        text: what was found, with the numbers.
        remedy: what to do, as a command where there is one; empty for `OK`.
    """

    check: str
    severity: Severity
    text: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """The finding with plain strings, for JSON."""
        return {**asdict(self), "severity": self.severity.value}


def ok(check: str, text: str) -> Finding:
    """A finding that asks for nothing."""
    return Finding(check, Severity.OK, text)


def warning(check: str, text: str, remedy: str) -> Finding:
    """A finding that makes serving slower, smaller or riskier."""
    return Finding(check, Severity.WARNING, text, remedy)


def error(check: str, text: str, remedy: str) -> Finding:
    """A finding that keeps the server from starting or working."""
    return Finding(check, Severity.ERROR, text, remedy)


def worst(findings: Iterable[Finding]) -> Severity:
    """The highest severity among the findings; `OK` when there are none."""
    order = list(Severity)
    return max((finding.severity for finding in findings), key=order.index, default=Severity.OK)


def gibibytes(num_bytes: float) -> str:
    """`12.3 GiB`."""
    return f"{num_bytes / 2**30:.1f} GiB"
