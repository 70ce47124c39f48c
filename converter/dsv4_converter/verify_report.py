"""A verification report as text, JSON and pictures."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsv4_converter.output_files import write_file
from dsv4_converter.tensor_statistics import KindStatistics
from dsv4_converter.verify import VerificationReport

MAX_LISTED_PROBLEMS = 50


def layer_order(layer: str) -> tuple[str, int]:
    """Sort key that puts ``layers.2`` before ``layers.10``."""
    group, _, index = layer.partition(".")
    return group, int(index) if index.isdigit() else -1


def _sorted_statistics(report: VerificationReport) -> list[tuple[str, str, KindStatistics]]:
    """(layer, kind, statistics), by layer, then by kind."""
    keys = sorted(report.statistics, key=lambda key: (layer_order(key.split(" ", 1)[0]), key))
    return [(*key.split(" ", 1), report.statistics[key]) for key in keys]  # type: ignore[misc]


def text_report(report: VerificationReport) -> str:
    """The report for people."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: VerificationReport) -> Iterator[str]:
    yield f"Checkpoint {report.directory}: {report.tensors} tensors"
    if report.source is not None:
        yield f"Source {report.source}"
    yield ""
    header = f"{'layer':<12}{'kind':<24}{'rows':>9}{'zero rows':>11}{'codes':>12}{'scales (log2)':>15}"
    yield header + (f"{'lossless':>10}{'error %':>9}{'worst row %':>13}" if report.source is not None else "")
    for layer, kind, item in _sorted_statistics(report):
        exponents = sorted(item.scale_exponents)
        scales = f"{exponents[0]}..{exponents[-1]}" if exponents else "-"
        codes = f"{item.least_code}..{item.greatest_code}"
        line = f"{layer:<12}{kind:<24}{item.rows:>9}{item.zero_rows:>11}{codes:>12}{scales:>15}"
        if report.source is not None:
            share = 100 * item.lossless_rows / item.rows if item.rows else 0.0
            line += f"{share:>9.1f}%{100 * item.relative_error:>9.3f}{100 * item.worst_row_error:>13.3f}"
        yield line
    yield ""
    yield from (f"note: {note}" for note in report.notes)
    for problem in report.problems[:MAX_LISTED_PROBLEMS]:
        yield f"PROBLEM {problem.where}: {problem.text}"
    if len(report.problems) > MAX_LISTED_PROBLEMS:
        yield f"... and {len(report.problems) - MAX_LISTED_PROBLEMS} more problems"
    yield "Sound" if report.sound else f"{len(report.problems)} problems"


def json_report(report: VerificationReport) -> dict[str, Any]:
    """The report for machines."""
    return {
        "directory": report.directory,
        "source": report.source,
        "sound": report.sound,
        "tensors": report.tensors,
        "problems": [{"where": problem.where, "text": problem.text} for problem in report.problems],
        "notes": report.notes,
        "weights": [
            {
                "layer": layer,
                "kind": kind,
                "rows": item.rows,
                "zero_rows": item.zero_rows,
                "least_code": item.least_code,
                "greatest_code": item.greatest_code,
                "scale_exponents": {str(key): item.scale_exponents[key] for key in sorted(item.scale_exponents)},
                **(_error_fields(item) if report.source is not None else {}),
            }
            for layer, kind, item in _sorted_statistics(report)
        ],
    }


def _error_fields(item: KindStatistics) -> dict[str, Any]:
    return {
        "lossless_rows": item.lossless_rows,
        "relative_error": item.relative_error,
        "worst_row_error": item.worst_row_error if math.isfinite(item.worst_row_error) else None,
    }


def write_report(report: VerificationReport, directory: Path) -> list[Path]:
    """Write ``report.txt``, ``report.json`` and, where Matplotlib is installed, the pictures. Returns the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / "report.txt", directory / "report.json"]
    write_file(paths[0], text_report(report).encode())
    write_file(paths[1], (json.dumps(json_report(report), indent=2) + "\n").encode())
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return paths
    if report.statistics:
        paths.append(_draw_scales(report, directory / "scales.png"))
    if report.statistics and report.source is not None:
        paths.append(_draw_errors(report, directory / "error.png"))
    return paths


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _draw_errors(report: VerificationReport, path: Path) -> Path:
    """Relative error of each kind over the layers."""
    rows = _sorted_statistics(report)
    layers = sorted({layer for layer, _, _ in rows}, key=layer_order)
    figure, axes = _figure(max(7.0, 0.2 * len(layers)), 5.0)
    for kind in sorted({kind for _, kind, _ in rows}):
        points = [(layers.index(layer), 100 * item.relative_error) for layer, own, item in rows if own == kind]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=kind)
    axes.set_xticks(range(len(layers)), layers, rotation=90, fontsize=7)
    axes.set_ylabel("relative weight error, percent (RMS)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=120)
    return path


def _draw_scales(report: VerificationReport, path: Path) -> Path:
    """Number of rows by the binary logarithm of their scale, by kind."""
    by_kind: dict[str, Counter[int]] = {}
    for _, kind, item in _sorted_statistics(report):
        by_kind.setdefault(kind, Counter()).update(item.scale_exponents)
    figure, axes = _figure(7.0, 5.0)
    exponents = sorted({exponent for counts in by_kind.values() for exponent in counts})
    bottom = [0] * len(exponents)
    for kind, counts in sorted(by_kind.items()):
        heights = [counts[exponent] for exponent in exponents]
        axes.bar(exponents, heights, bottom=bottom, width=0.9, label=kind)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xlabel("floor(log2(scale))")
    axes.set_ylabel("rows")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    return path
