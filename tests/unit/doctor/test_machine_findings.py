"""Each fault of a machine gives its one finding, with a remedy; a sound machine gives none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from dsv4.doctor import DoctorOptions, Finding, Severity, examine
from dsv4.doctor.machine import CommandResult, FileSystemSpace, Platform
from dsv4.doctor.npu_smi import parse_npu_smi
from dsv4.doctor.triton_checks import check_triton

from tests.unit.doctor.fake_machine import FakeMachine, npu_smi_table, sound_npu_machine

NPU = DoctorOptions(backend="npu", cache_directory=Path("/var/cache/dsv4"))
Fault = Callable[[FakeMachine], None]


def problems(machine: FakeMachine, options: DoctorOptions = NPU) -> dict[str, Finding]:
    """Findings other than OK by name, without Triton's, which is examined in the real environment."""
    findings = [f for f in examine(machine, options) if f.severity is not Severity.OK]
    return {f.check: f for f in findings if not f.check.startswith("triton.")}


def smi(**changes: object) -> Fault:
    def put(machine: FakeMachine) -> None:
        machine.commands["npu-smi info"] = CommandResult(0, npu_smi_table(**changes))  # type: ignore[arg-type]

    return put


def without(table: str, key: str) -> Fault:
    def take(machine: FakeMachine) -> None:
        container = getattr(machine, table)
        if isinstance(container, set):
            container.remove(key)
        else:
            del container[key]

    return take


def setting(table: str, key: str, value: object) -> Fault:
    return lambda machine: getattr(machine, table).__setitem__(key, value)


def attribute(name: str, value: object) -> Fault:
    return lambda machine: setattr(machine, name, value)


@pytest.mark.parametrize("backend", ["npu", "torch-npu", "auto"])
def test_a_sound_machine_has_no_problem(backend: str) -> None:
    machine = sound_npu_machine()
    assert problems(machine, DoctorOptions(backend=backend, cache_directory=NPU.cache_directory)) == {}


FAULTS: list[tuple[str, Severity, str, str, Fault]] = [
    ("npu.smi", Severity.ERROR, "not installed", "HDK", without("commands", "npu-smi info")),
    ("npu.smi", Severity.ERROR, "status 255: dcmi module", "driver",
     setting("commands", "npu-smi info", CommandResult(255, "\ndcmi module initialize failed. ret is -8005\n"))),
    ("npu.smi", Severity.ERROR, "lists no chip", "HDK", smi(cards=0)),
    ("npu.count", Severity.ERROR, "devices 6, 7 are not there", "--devices", smi(cards=6)),
    ("npu.health", Severity.ERROR, "device 3 (910B2, 0000:C3:00.0) reports Alarm", "reset", smi(health={3: "Alarm"})),
    ("npu.busy", Severity.ERROR, "process 4711 (python3, 39.1 GiB)", "kill -9 4711",
     smi(used={5: 43000}, processes=((5, 0, 4711, "python3", 40000),))),
    ("npu.leaked_memory", Severity.ERROR, "device 2 has 29.3 GiB in use", "another container", smi(used={2: 30000})),
    ("npu.device_files", Severity.ERROR, "missing: /dev/devmm_svm", "--device", without("files", "/dev/devmm_svm")),
    ("npu.permission", Severity.ERROR, "may not open /dev/davinci0", "HwHiAiUser",
     attribute("denied", {"/dev/davinci0"})),
    ("driver.version", Severity.ERROR, "version.info is not there", "mount",
     without("files", "/usr/local/Ascend/driver/version.info")),
    ("cann.version", Severity.ERROR, "no CANN", "CANN image",
     without("files", "/usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info")),
    ("cann.environment", Severity.ERROR, "ASCEND_HOME_PATH is not set", "set_env.sh", attribute("environment", {})),
    ("pypto.serving", Severity.ERROR, "not importable", "PYTHONPATH", without("modules", "pypto_serving")),
    ("pypto.pypto", Severity.ERROR, "not importable", "another project", without("modules", "pypto")),
    ("pypto.lib_root", Severity.ERROR, "/nowhere does not exist", "pypto-lib",
     setting("environment", "PYPTO_LIB_ROOT", "/nowhere")),
    ("environment.obsolete", Severity.WARNING, "PTO2_OP_EXECUTE_TIMEOUT_US", "SIMPLER_OP_EXECUTE_TIMEOUT_US",
     setting("environment", "PTO2_OP_EXECUTE_TIMEOUT_US", "1")),
    ("environment.build_directory", Severity.WARNING, "bypasses the cache", "unset PYPTO_PROG_BUILD_DIR",
     lambda machine: machine.environment.update(PYPTO_PROG_BUILD_DIR="/tmp/b", PYPTO_CACHE="1")),
    ("environment.cache_directory", Severity.WARNING, "/cache does not exist", "mkdir",
     setting("environment", "PYPTO_CACHE_DIR", "/cache")),
    ("memory.shm", Severity.ERROR, "0.1 GiB free of 0.1 GiB", "--shm-size=64g",
     setting("spaces", "/dev/shm", FileSystemSpace(64 << 20, 64 << 20))),
    ("memory.shm", Severity.ERROR, "/dev/shm is not there", "emptyDir", without("spaces", "/dev/shm")),
    ("limits.open_files", Severity.WARNING, "1024 open files", "ulimit -n", setting("limits", "NOFILE", 1024)),
    ("limits.locked_memory", Severity.WARNING, "limited to 0.0 GiB", "memlock", setting("limits", "MEMLOCK", 65536)),
    ("disk.cache", Severity.ERROR, "0.5 GiB left", "DSV4_CACHE_DIR",
     setting("spaces", "/var/cache/dsv4", FileSystemSpace(1 << 40, 1 << 29))),
    ("disk.cache", Severity.ERROR, "cannot be written", "DSV4_CACHE_DIR", attribute("denied", {"/var/cache/dsv4"})),
    ("network.port", Severity.ERROR, "port 8225 of 127.0.0.1 is in use", "ss -ltnp", attribute("taken_ports", {8225})),
    ("python.version", Severity.ERROR, "Python 3.9.2", "PYTHON=python3.11",
     attribute("platform", Platform((3, 9, 2), "aarch64", "2.35", ""))),
    ("system.glibc", Severity.ERROR, "glibc 2.31 is older than 2.35", "Ubuntu 22.04",
     attribute("platform", Platform((3, 11, 2), "aarch64", "2.31", ""))),
    ("system.glibc", Severity.ERROR, "no GNU C library", "Debian",
     attribute("platform", Platform((3, 11, 2), "aarch64", "", ""))),
    ("torch.version", Severity.ERROR, "torch is not installed", "make setup", without("distributions", "torch")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "severity", "text", "remedy", "fault"), FAULTS, ids=[f"{row[0]}-{i}" for i, row in enumerate(FAULTS)]
)
def test_each_fault_has_its_finding(check: str, severity: Severity, text: str, remedy: str, fault: Fault) -> None:
    machine = sound_npu_machine()
    fault(machine)
    found = problems(machine)
    assert list(found) == [check]
    assert found[check].severity is severity
    assert text in found[check].text
    assert remedy in found[check].remedy


@pytest.mark.parametrize(
    ("distributions", "cann", "check", "text"),
    [
        ({"torch": "2.10.0"}, "9.0.0", "torch_npu.version", "not installed"),
        ({"torch": "2.9.1", "torch-npu": "2.10.0.post4"}, "9.1.0", "torch_npu.torch", "does not fit torch 2.9.1"),
        ({"torch": "2.10.0", "torch-npu": "2.10.0"}, "8.5.0", "torch_npu.cann", "for CANN 9.0 or newer, found 8.5.0"),
        ({"torch": "2.7.1", "torch-npu": "2.7.1.post1"}, "8.1.RC1", "torch_npu.cann", "found 8.1.RC1"),
        ({"torch": "3.1.0", "torch-npu": "3.1.0"}, "9.0.0", "torch_npu.cann", "not in our table"),
    ],
)  # fmt: skip
def test_torch_npu_fits_torch_and_cann(distributions: dict[str, str], cann: str, check: str, text: str) -> None:
    machine = sound_npu_machine()
    machine.distributions = distributions
    machine.files["/usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info"] = f"version={cann}\n"
    found = problems(machine, DoctorOptions(backend="torch-npu"))
    assert list(found) == [check]
    assert text in found[check].text


def test_a_machine_without_npus_is_a_cpu_machine() -> None:
    machine = FakeMachine(distributions={"torch": "2.13.0"}, spaces={"/dev/shm": FileSystemSpace(1 << 30, 1 << 30)})
    assert problems(machine, DoctorOptions()) == {}
    assert "npu.smi" in problems(machine, NPU)


def test_two_chips_on_a_card_are_two_devices() -> None:
    table = parse_npu_smi(
        npu_smi_table(cards=2, chips_per_card=2, used={3: 9000}, processes=((1, 1, 77, "python", 5000),))
    )
    assert [(chip.device, chip.card, chip.chip) for chip in table.chips] == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert table.chips[3].memory_used == 9000 << 20
    assert table.chips[3].memory_total == 65536 << 20
    assert [(p.card, p.chip, p.pid, p.memory) for p in table.processes] == [(1, 1, 77, 5000 << 20)]
    assert table.version == "24.1.rc2"


def test_a_published_table_of_an_atlas_a3_is_understood() -> None:
    """Rows as printed by npu-smi 24.1.rc3.7, where the second chip of a card has no power figure."""
    table = parse_npu_smi(
        """
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc3.7               Version: 24.1.rc3.7                                           |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     Ascend910           | OK            | 178.8       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3397 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | Warning       | -           36                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          3186 / 65536         |
+===========================+===============+====================================================+
"""
    )
    assert [(c.device, c.name, c.health, c.memory_used >> 20) for c in table.chips] == [
        (0, "Ascend910", "OK", 3397),
        (1, "Ascend910", "Warning", 3186),
    ]


@pytest.mark.parametrize("text", ["", "no table", "| a | b |\n|||\n| 0 0 | x | y |", "| 0 910B | OK |"])
def test_other_output_gives_an_empty_table(text: str) -> None:
    assert parse_npu_smi(text).chips == ()


def test_a_triton_without_stub_or_libpython_is_said(tmp_path: Path) -> None:
    machine = FakeMachine(files={str(tmp_path / "bin/tritonserver"): ""})
    stub = str(tmp_path / "python_backend_stubs/3.11/triton_python_backend_stub")

    def stub_finding() -> Finding:
        return next(f for f in check_triton(machine, tmp_path) if f.check == "triton.stub")

    assert "is not there" in stub_finding().text
    machine.files[stub] = ""
    machine.commands[f"ldd {stub}"] = CommandResult(0, "\tlibpython3.11.so.1.0 => not found\n\tlibc.so.6 => /lib/c\n")
    assert stub_finding().remedy.startswith("apt-get install libpython3.11")
    machine.files["/usr/lib/libpython3.11.so.1.0"] = ""
    assert stub_finding().severity is Severity.OK
    machine.commands[f"ldd {stub}"] = CommandResult(0, "\tlibz.so.1 => not found\n")
    assert "lacks libz.so.1" in stub_finding().text
