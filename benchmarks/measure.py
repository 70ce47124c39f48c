"""Running commands as measured child processes, and the disk's own speed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Measurement:
    """Wall and processor seconds and peak resident bytes of a child process."""

    wall: float
    cpu: float
    peak: int


def run_measured(command: Sequence[str | os.PathLike[str]]) -> Measurement:
    """Run a command to its end. Its output is shown only if it fails (then the program ends)."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(output.decode() + f"\n{command[0]} ended with {process.returncode}")
    return Measurement(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def copy_seconds(files: Sequence[Path], target: Path, write_bytes: int) -> float:
    """Seconds to read the files and to write so many bytes durably, with plain buffered reads and writes."""
    started = time.perf_counter()
    written = 0
    with target.open("wb") as writer:
        for path in files:
            with path.open("rb") as reader:
                while chunk := reader.read(8 << 20):
                    written += writer.write(chunk[: max(0, write_bytes - written)])
        filler = bytes(8 << 20)
        while written < write_bytes:
            written += writer.write(filler[: write_bytes - written])
        os.fsync(writer.fileno())
    seconds = time.perf_counter() - started
    target.unlink()
    return seconds


def remove(path: Path) -> None:
    """Remove a directory or file if it is there, and let the disk settle."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    os.sync()


def print_table(rows: Sequence[tuple[str, Measurement]], gigabytes: float, unit: str) -> None:
    """One line a contender, per GB and relative to the first."""
    first = rows[0][1]
    print(f"{'':<28}{'wall s':>9}{'s/GB':>8}{'CPU s':>9}{'s/GB':>8}{'peak GB':>9}{'wall x':>8}{'CPU x':>8}")
    for name, item in rows:
        print(
            f"{name:<28}{item.wall:>9.2f}{item.wall / gigabytes:>8.2f}{item.cpu:>9.2f}{item.cpu / gigabytes:>8.2f}"
            f"{item.peak / 1e9:>9.2f}{item.wall / first.wall:>8.1f}{item.cpu / first.cpu:>8.1f}"
        )
    print(f"(per GB of {unit}; x: times the first line)")
