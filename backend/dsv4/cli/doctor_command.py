"""`dsv4 doctor`: examine this machine and a checkpoint before serving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dsv4.default_model import cache_directory, shipped_model_directory
from dsv4.doctor import DoctorOptions, Finding, LocalMachine, Severity, examine, worst
from dsv4.doctor.options import NPU_BACKENDS

BACKENDS = ("auto", "cpu", "cuda", "npu", "torch-npu")
MARKS = {
    Severity.OK: "[green]ok[/green]     ",
    Severity.WARNING: "[yellow]warning[/yellow]",
    Severity.ERROR: "[red]error[/red]  ",
}


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("doctor")
    def doctor(
        model: Annotated[
            Path | None, typer.Option(help="Checkpoint directory; default: the shipped dsv4-nano, except on NPUs.")
        ] = None,
        backend: Annotated[str, typer.Option(help=f"As of dsv4 serve: {', '.join(BACKENDS)}.")] = "auto",
        devices: Annotated[str, typer.Option(help="Device numbers that will be used.")] = "0,1,2,3,4,5,6,7",
        host: Annotated[str, typer.Option(help="Address the server will bind.")] = "127.0.0.1",
        port: Annotated[int, typer.Option(help="Port of the OpenAI-compatible API.")] = 8225,
        as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
        quiet: Annotated[bool, typer.Option("--quiet", help="Leave out what is as it should be.")] = False,
    ) -> None:
        """Say what is wrong with this machine or checkpoint, and the remedy. Exit status 1 when serving would fail."""
        if backend not in BACKENDS:
            raise typer.BadParameter(f"must be one of {', '.join(BACKENDS)}", param_hint="--backend")
        device_numbers = _device_numbers(devices)
        options = DoctorOptions(
            model=model or (None if backend in NPU_BACKENDS else shipped_model_directory()),
            backend=backend,
            devices=device_numbers,
            host=host,
            ports=(port, 8000, 8001, 8002),
            cache_directory=cache_directory(),
        )
        findings = []
        console = Console(soft_wrap=True, highlight=False)
        for finding in examine(LocalMachine(), options):
            if quiet and finding.severity is Severity.OK:
                continue
            findings.append(finding)
            if not as_json:
                _print(console, finding)
        if as_json:
            document = {"worst": worst(findings).value, "findings": [finding.as_dict() for finding in findings]}
            typer.echo(json.dumps(document, ensure_ascii=False, indent=2))
        if worst(findings) is Severity.ERROR:
            raise typer.Exit(1)


def _device_numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(parts)) != len(parts):
        raise typer.BadParameter("must be different numbers, such as 0,1,2,3", param_hint="--devices")
    return tuple(int(part) for part in parts)


def _print(console: Console, finding: Finding) -> None:
    console.print(f"{MARKS[finding.severity]}  [bold]{finding.check}[/bold]", end="  ")
    console.print(finding.text, markup=False)
    if finding.remedy:
        console.print(f"         remedy: {finding.remedy}", markup=False)
