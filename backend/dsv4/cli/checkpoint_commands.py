"""`dsv4 convert`, `dsv4 prepack`, `dsv4 verify`: from a released checkpoint to the form that engines load."""

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
    app.command("prepack")(prepack_command)
    app.command("verify")(verify_command)


class _Stop:
    """Turns SIGINT and SIGTERM into an event and remembers which it was."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.signal_number = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        self.event.set()


@contextlib.contextmanager
def _stop_on_signals(command: str, remedy: str) -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set. A run that stops for it ends the program with one line and 128 + signal."""
    from dsv4_converter import ConversionCancelledError

    stop = _Stop()
    previous = {number: signal.signal(number, stop.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop.event
    except ConversionCancelledError:
        _say(f"dsv4 {command}: stopped by {signal.Signals(stop.signal_number).name}; {remedy}")
        raise typer.Exit(128 + stop.signal_number) from None
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
    from dsv4_converter import convert
    from dsv4_converter.progress_display import ProgressDisplay

    with (
        _stop_on_signals("convert", "continue with --resume") as stop,
        ProgressDisplay(json_lines=json_lines) as display,
    ):
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
            cancelled=stop,
        )
    if not json_lines:
        _print_summary(summary)


def prepack_command(
    model_dir: Annotated[Path, typer.Argument(help="W8A8 checkpoint, made by dsv4 convert.")],
    ranks: Annotated[int, typer.Option("--ranks", help="Ranks to pack for; must divide the routed experts.")] = 8,
    output: Annotated[
        Path | None, typer.Option("--output", help="Path of the sidecar; beside the checkpoint if not given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing sidecar.")] = False,
    warm: Annotated[
        bool, typer.Option("--warm", help="Read the sidecar into the page cache; make it first if it is missing.")
    ] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Write events as JSON lines to standard output.")] = False,
) -> None:
    """Pack the hidden-layer weights of a W8A8 checkpoint into the sidecar that makes later starts fast."""
    from dsv4_converter import prepack
    from dsv4_converter.progress_display import ProgressDisplay

    with (
        _stop_on_signals("prepack", "the next run continues") as stop,
        ProgressDisplay(json_lines=json_lines) as display,
    ):
        summary = prepack(
            model_dir, ranks=ranks, output=output, force=force, warm=warm, progress=display, cancelled=stop
        )
    if not json_lines:
        state = "in memory" if summary.warmed else "complete"
        typer.echo(f"Sidecar {state}: {summary.path} ({summary.num_bytes / 1e9:.2f} GB)")


def verify_command(
    model_dir: Annotated[Path, typer.Argument(help="W8A8 checkpoint to check.")],
    source: Annotated[
        Path | None, typer.Option("--source", help="The source checkpoint: compute the exact error of every weight.")
    ] = None,
    report_dir: Annotated[
        Path | None, typer.Option("--report", help="Write report.txt, report.json and pictures to this directory.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check a W8A8 checkpoint. Ends with status 1 if anything is wrong with it."""
    import json

    from dsv4_converter import verify
    from dsv4_converter.progress_display import ProgressDisplay
    from dsv4_converter.verify_report import json_report, text_report, write_report

    with _stop_on_signals("verify", "nothing was changed") as stop, ProgressDisplay() as display:
        report = verify(model_dir, source=source, progress=display, cancelled=stop)
    typer.echo(json.dumps(json_report(report), indent=2) if json_output else text_report(report), nl=json_output)
    if report_dir is not None:
        for path in write_report(report, report_dir):
            _say(f"wrote {path}")
    if not report.sound:
        raise typer.Exit(1)


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
    from dsv4_converter.verify_report import layer_order

    yield "Rows stored without loss, percent:"
    yield " " * width + "  ".join(kinds)
    for layer in sorted(table, key=layer_order):
        cells = (f"{table[layer][kind]:.1f}" if kind in table[layer] else "-" for kind in kinds)
        yield layer.ljust(width) + "  ".join(cell.rjust(len(kind)) for cell, kind in zip(cells, kinds, strict=True))
