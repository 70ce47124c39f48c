"""A machine made of plain values: a sound eight-NPU one, with faults put in by each test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dsv4.doctor.machine import CommandResult, FileSystemSpace, Platform

CARD = "| {card:<5} {name:<20}| {health:<14}| 93.6        40                0    / 0             |"
CHIP = "| {chip:<5} {phy:<20}| 0000:{bus:02X}:00.0  | 0           0    / 0          {used:<5}/ 65536         |"
SINGLE = "+---------------------------+---------------+----------------------------------------------------+"
DOUBLE = SINGLE.replace("-", "=")


def npu_smi_table(
    *,
    cards: int = 8,
    chips_per_card: int = 1,
    health: Mapping[int, str] | None = None,
    used: Mapping[int, int] | None = None,
    processes: tuple[tuple[int, int, int, str, int], ...] = (),
) -> str:
    """What `npu-smi info` prints (layout of 24.1 on Atlas A2; with two chips a card, of Atlas A3)."""
    two = chips_per_card > 1
    lines = [
        SINGLE,
        "| npu-smi 24.1.rc2                 Version: 24.1.rc2                                             |",
        SINGLE,
        "| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|",
        "| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |".replace(
            "Phy-ID", "Phy-ID" if two else "      "
        ),
        DOUBLE,
    ]
    for card in range(cards):
        for chip in range(chips_per_card):
            device = card * chips_per_card + chip
            name = "Ascend910" if two else "910B2"
            lines.append(CARD.format(card=card, name=name, health=(health or {}).get(device, "OK")))
            phy = str(device) if two else ""
            lines.append(CHIP.format(chip=chip, phy=phy, bus=0xC0 + device, used=(used or {}).get(device, 3364)))
            lines.append(SINGLE)
    lines += [
        "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |",
        DOUBLE,
    ]
    for card, chip, pid, name, memory in processes:
        lines.append(f"| {card:<7} {chip:<18}| {pid:<14}| {name:<25}| {memory:<24}|")
    if not processes:
        lines.append(
            "| No running processes found in NPU 0                                                            |"
        )
    return "\n".join([*lines, DOUBLE, ""])


@dataclass
class FakeMachine:
    """Implements `dsv4.doctor.machine.Machine`. Commands and files that are not named do not exist."""

    environment: dict[str, str] = field(default_factory=lambda: {"ASCEND_HOME_PATH": "/usr/local/Ascend/cann"})
    platform: Platform = field(default_factory=lambda: Platform((3, 11, 7), "aarch64", "2.35", "/usr/lib"))
    files: dict[str, str] = field(default_factory=dict)
    denied: set[str] = field(default_factory=set)
    commands: dict[str, CommandResult] = field(default_factory=dict)
    distributions: dict[str, str] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    memory_bytes: tuple[int, int] = (1 << 40, 900 << 30)
    spaces: dict[str, FileSystemSpace] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=lambda: {"NOFILE": 65536, "MEMLOCK": -1})
    taken_ports: set[int] = field(default_factory=set)
    bytes_per_second: float | None = 2e9
    residency: float | None = 1.0

    def exists(self, path: str) -> bool:
        return path in self.files or path in self.spaces

    def usable_device(self, path: str) -> bool:
        return self.exists(path) and path not in self.denied

    def read_text(self, path: str) -> str | None:
        return self.files.get(path)

    def run(self, *command: str) -> CommandResult | None:
        return self.commands.get(" ".join(command))

    def distribution_version(self, name: str) -> str | None:
        return self.distributions.get(name)

    def has_module(self, name: str) -> bool:
        return name in self.modules

    def memory(self) -> tuple[int, int]:
        return self.memory_bytes

    def space(self, path: str) -> FileSystemSpace | None:
        return self.spaces.get(path)

    def limit(self, name: str) -> int:
        return self.limits[name]

    def port_is_free(self, host: str, port: int) -> bool:
        return port not in self.taken_ports

    def read_speed(self, path: Path, num_bytes: int) -> float | None:
        return self.bytes_per_second

    def page_cache_residency(self, path: Path) -> float | None:
        return self.residency


def sound_npu_machine() -> FakeMachine:
    """Eight free and healthy chips, driver, CANN, torch_npu and upstream's packages that fit each other."""
    machine = FakeMachine(
        commands={"npu-smi info": CommandResult(0, npu_smi_table())},
        distributions={"torch": "2.10.0+cpu", "torch-npu": "2.10.0", "pypto": "0.1.0"},
        modules={"pypto_serving", "pypto", "simpler", "torch", "torch_npu"},
        spaces={
            "/dev/shm": FileSystemSpace(64 << 30, 60 << 30),
            "/var/cache/dsv4": FileSystemSpace(500 << 30, 400 << 30),
        },
    )
    devices = ("davinci_manager", "devmm_svm", "hisi_hdc", *(f"davinci{i}" for i in range(8)))
    machine.files.update({f"/dev/{name}": "" for name in devices})
    machine.files["/usr/local/Ascend/driver/version.info"] = "Version=24.1.rc2\nascendhal_version=7.35.19\n"
    machine.files["/usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info"] = (
        "package_name=Ascend-cann-toolkit\nversion=9.0.0\narch=aarch64\n"
    )
    return machine
