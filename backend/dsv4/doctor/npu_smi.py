"""Reading the table that `npu-smi info` prints.

Each chip takes two rows: `NPU Name | Health | Power Temp Hugepages` and `Chip [Phy-ID] | Bus-Id | AICore Memory HBM`.
Machines with two chips a card (Atlas A3) have the Phy-ID column; elsewhere the card number is the device number.
A second table lists processes: `NPU Chip | Process id | Process name | Process memory(MB)`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MEGABYTE = 1 << 20

_VERSION = re.compile(r"npu-smi\s+(\S+)\s+Version:\s*(\S+)")
_USAGE = re.compile(r"(\d+)\s*/\s*(\d+)")


@dataclass(frozen=True)
class NpuChip:
    """One device. `health` is the driver's word (`OK`, `Warning`, `Alarm`, `Critical`); memory in bytes."""

    device: int
    card: int
    chip: int
    name: str
    health: str
    bus_id: str
    memory_used: int
    memory_total: int


@dataclass(frozen=True)
class NpuProcess:
    """A process that holds memory of a chip, in bytes."""

    card: int
    chip: int
    pid: int
    name: str
    memory: int


@dataclass(frozen=True)
class NpuTable:
    """The parsed output. `version` is that of npu-smi, which ships with the driver."""

    version: str
    chips: tuple[NpuChip, ...]
    processes: tuple[NpuProcess, ...]


def parse_npu_smi(output: str) -> NpuTable:
    """Read the output of `npu-smi info`. Rows that are not understood are left out."""
    match = _VERSION.search(output)
    chips: list[NpuChip] = []
    processes: list[NpuProcess] = []
    pending: tuple[int, str, str] | None = None
    for cells in _rows(output):
        first = cells[0].split()
        if len(cells) == 4 and len(first) == 2 and all(part.isdecimal() for part in (*first, cells[1], cells[3])):
            processes.append(
                NpuProcess(int(first[0]), int(first[1]), int(cells[1]), cells[2], int(cells[3]) * MEGABYTE)
            )
        elif len(cells) == 3 and _is_bus_id(cells[1]):
            if pending is not None:
                chips.append(_chip(pending, first, cells))
            pending = None
        elif len(cells) == 3 and len(first) >= 2 and first[0].isdecimal():
            pending = (int(first[0]), " ".join(first[1:]), cells[1])
    return NpuTable(match[1] if match else "", tuple(chips), tuple(processes))


def _rows(output: str) -> list[list[str]]:
    lines = (line.strip() for line in output.splitlines())
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("|")]


def _is_bus_id(text: str) -> bool:
    return re.fullmatch(r"[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]", text) is not None


def _chip(pending: tuple[int, str, str], first: list[str], cells: list[str]) -> NpuChip:
    card, name, health = pending
    chip = int(first[0])
    device = int(first[1]) if len(first) > 1 and first[1].isdecimal() else card
    # The last pair is the HBM usage; the pair before it is zero on these chips.
    used, total = (_USAGE.findall(cells[2]) or [("0", "0")])[-1]
    return NpuChip(device, card, chip, name, health, cells[1], int(used) * MEGABYTE, int(total) * MEGABYTE)
