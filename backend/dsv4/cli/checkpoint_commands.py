"""`dsv4 convert`: from a released checkpoint to the form that engines load."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from types import FrameType

    from dsv4_converter import ConversionSummary


class Rounding(str, Enum):
    """Values of ``--rounding``."""

    exact = "exact"
    rtn = "rtn"


def register(app: typer.Typer) -> None:
    """Add the checkpoint commands."""
    app.command("convert")(convert_command)


class _Stop:
    """Turns SIGINT and SIGTERM into an event and remembers which it was."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.signal_number = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        self.event.set()


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[_Stop]:
    stop = _Stop()
    previous = {number: signal.signal(number, stop.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def convert_command(
    input_dir: Annotated[
        Path, typer.Option("--input-dir", help="Source checkpoint (FP8 and MXFP4), a local directory.")
    ],
    output_dir: Annotated[Path, typer.Option("--output-dir", help="Directory of the W8A8 checkpoint; it is created.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the source, print the plan, write nothing.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted conversion.")] = False,
    rounding: Annotated[
        Rounding,
        typer.Option(
            "--rounding",
            help="exact: store rows without loss where a power-of-two scale can; rtn: always round to nearest.",
        ),
    ] = Rounding.exact,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Shards converted at the same time; chosen if not given.")
    ] = None,
    memory: Annotated[float, typer.Option("--memory", min=0.1, help="Memory bound in GiB.")] = 2.0,
    verify: Annotated[bool, typer.Option("--verify", help="Read the output again and compare checksums.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Write events as JSON lines to standard output.")] = False,
) -> None:
    """Convert a DeepSeek V4 source checkpoint to the W8A8 form that engines load."""
    from dsv4_converter import ConversionCancelledError, convert
    from dsv4_converter.progress_display import ProgressDisplay

    with _stop_on_signals() as stop:
        try:
            with ProgressDisplay(json_lines=json_lines) as display:
                summary = convert(
                    input_dir,
                    output_dir,
                    rounding=rounding.value,
                    resume=resume,
                    jobs=jobs,
                    memory_bytes=int(memory * 2**30),
                    verify=verify,
                    dry_run=dry_run,
                    progress=display,
                    cancelled=stop.event,
                )
        except ConversionCancelledError:
            _say(f"dsv4 convert: stopped by {signal.Signals(stop.signal_number).name}; continue with --resume")
            raise typer.Exit(128 + stop.signal_number) from None
    if not json_lines:
        _print_summary(summary)


def _print_summary(summary: ConversionSummary) -> None:
    sizes = f"{summary.source_bytes / 1e9:.2f} GB -> {summary.output_bytes / 1e9:.2f} GB"
    if summary.dry_run:
        typer.echo(f"Would write {len(summary.shards)} shards to {summary.output}: {sizes}. Source is complete.")
        for name, size in summary.shards.items():
            typer.echo(f"  {name}  {size / 1e9:.3f} GB")
        return
    for line in _lossless_lines(summary.lossless):
        typer.echo(line)
    if summary.not_copied:
        typer.echo(f"Not copied: {', '.join(summary.not_copied)}")
    typer.echo(f"{len(summary.converted)} shards converted, {len(summary.reused)} kept: {sizes}")
    typer.echo(f"Conversion complete: {summary.output}")


def _lossless_lines(lossless: dict[str, tuple[int, int]]) -> Iterator[str]:
    """A table of the share of lossless rows: one line a layer, one column a kind."""
    if not any(count for _, count in lossless.values()):
        return
    table: dict[str, dict[str, float]] = {}
    for key, (rows, count) in lossless.items():
        layer, kind = key.split(" ", 1)
        table.setdefault(layer, {})[kind] = 100 * count / rows if rows else 0.0
    kinds = sorted({kind for row in table.values() for kind in row})
    width = max(map(len, table)) + 2
    yield "Rows stored without loss, percent:"
    yield " " * width + "  ".join(kinds)
    for layer in sorted(table, key=_layer_order):
        cells = (f"{table[layer][kind]:.1f}" if kind in table[layer] else "-" for kind in kinds)
        yield layer.ljust(width) + "  ".join(cell.rjust(len(kind)) for cell, kind in zip(cells, kinds, strict=True))


def _layer_order(layer: str) -> tuple[str, int]:
    group, _, index = layer.partition(".")
    return group, int(index) if index.isdigit() else -1
