"""One run of the load generator, with live progress."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dsv4_clients.bench.report import latency_picture, result_table
from dsv4_clients.bench.runner import RequestRecord, run_workload
from dsv4_clients.bench.summary import Goal, summarize
from dsv4_clients.bench.workload import Workload


def run_bench(
    workload: Workload, goal: Goal, *, console: Console, output: Path | None = None, picture: Path | None = None
) -> dict[str, Any]:
    """Run, show the table, write the files that were asked for, and give the summary."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rate]:.1f} tokens/s, {task.fields[failed]} failed"),
        console=console,
    ) as progress:
        task = progress.add_task(workload.base_url, total=workload.requests, rate=0.0, failed=0)
        tokens = failed = 0

        def show(record: RequestRecord) -> None:
            nonlocal tokens, failed
            tokens += record.completion_tokens
            failed += record.error is not None
            progress.update(task, advance=1, rate=tokens / record.ended if record.ended else 0.0, failed=failed)

        records = asyncio.run(run_workload(workload, show))
    summary = summarize(records, goal)
    console.print(result_table(summary))
    for message, count in summary["errors"].items():
        console.print(f"{count} x {message}", style="red", markup=False)
    if output is not None:
        described = {**asdict(workload), "api_key": None, "dataset": str(workload.dataset or "")}
        output.write_text(json.dumps({"workload": described, **summary}, indent=2) + "\n", encoding="utf-8")
    if picture is not None:
        title = f"{workload.requests} requests, concurrency {workload.concurrency}"
        picture.write_text(latency_picture(records, title), encoding="utf-8")
    return summary
