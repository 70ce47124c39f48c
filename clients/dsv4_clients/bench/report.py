"""Showing the result of a load run: a table for people, a picture, JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from rich.table import Table

from dsv4_clients.bench.runner import RequestRecord

DISTRIBUTIONS = {
    "time_to_first_token_ms": "time to first token",
    "inter_token_ms": "between two outputs",
    "time_per_output_token_ms": "per output token",
    "request_ms": "whole request",
}
_WIDTH, _HEIGHT, _MARGIN = 720, 300, 56


def result_table(summary: dict[str, Any]) -> Table:
    """Latencies as rows; the rates in the caption."""
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    acceptance = summary["draft_acceptance"]
    caption = (
        f"{summary['succeeded']} of {summary['requests']} requests in {summary['wall_seconds']:.1f} s: "
        f"{summary['requests_per_second']:.2f} requests/s ({summary['good_requests_per_second']:.2f} good), "
        f"{summary['output_tokens_per_second']:.1f} output tokens/s"
    )
    if acceptance is not None:
        caption += f", {acceptance:.0%} of drafts accepted"
    table = Table(title="milliseconds", caption=caption)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for name, title in DISTRIBUTIONS.items():
        values = summary[name]
        cells = ["-"] * len(columns) if values is None else [f"{values[column]:.1f}" for column in columns]
        table.add_row(title, *cells)
    return table


def latency_picture(records: Sequence[RequestRecord], title: str) -> str:
    """An SVG with the cumulative distributions of time to first token and of whole requests."""
    good = [record for record in records if record.error is None and record.first_output is not None]
    curves = {
        "time to first token": sorted((r.first_output or 0.0) - r.started for r in good),
        "whole request": sorted(r.ended - r.started for r in good),
    }
    longest = max((values[-1] for values in curves.values() if values), default=1.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_WIDTH / 2}" y="20" text-anchor="middle" font-size="14">{escape(title)}</text>',
        *_axes(longest),
    ]
    for index, ((name, values), color) in enumerate(zip(curves.items(), ("#1f6feb", "#d1242f"), strict=True)):
        points = " ".join(
            f"{_x(value, longest):.1f},{_y((rank + 1) / len(values)):.1f}" for rank, value in enumerate(values)
        )
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{points}"/>')
        parts.append(f'<text x="{_MARGIN + 12}" y="{_MARGIN + 16 * index}" fill="{color}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _axes(longest: float) -> list[str]:
    lines = []
    for step in range(5):
        share = step / 4
        x, y = _x(share * longest, longest), _y(share)
        lines.append(f'<line x1="{_MARGIN}" x2="{_WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{_MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
        label = f"{share * longest * 1000:.0f} ms"
        lines.append(f'<text x="{x:.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{label}</text>')
    return lines


def _x(seconds: float, longest: float) -> float:
    return _MARGIN + (_WIDTH - _MARGIN - 40) * seconds / longest


def _y(share: float) -> float:
    return _HEIGHT - 40 - (_HEIGHT - 40 - 32) * share
