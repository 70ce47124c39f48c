"""Are the NPUs there, healthy, free and reachable by this user?"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator

from dsv4.doctor.findings import Finding, error, gibibytes, ok, warning
from dsv4.doctor.machine import Machine
from dsv4.doctor.npu_smi import NpuChip, NpuTable, parse_npu_smi
from dsv4.doctor.options import DoctorOptions

MANAGEMENT_DEVICES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
MINIMUM_DEVICE_MEMORY = 60 << 30
"""One rank's W8A8 weights of DeepSeek V4 Flash take about 41 GiB; caches and buffers come on top."""

FREE_DEVICE_OVERHEAD = 8 << 30
"""An idle chip of these generations reports up to about 4 GiB in use by the firmware and the driver."""

INSTALL_DRIVER = "install the Ascend HDK (driver and firmware), then check with: npu-smi info"


def has_npu_traces(machine: Machine) -> bool:
    """Whether this looks like an Ascend machine at all."""
    return machine.exists("/dev/davinci_manager") or machine.exists("/usr/local/Ascend/driver/version.info")


def check_npus(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """Driver tool, device files, and each chip that will be used."""
    table = yield from _npu_table(machine)
    yield from check_device_files(machine, options.devices)
    if table is None:
        return
    by_device = {chip.device: chip for chip in table.chips}
    missing = [device for device in options.devices if device not in by_device]
    if missing:
        yield error(
            "npu.count",
            f"npu-smi lists {len(by_device)} chips ({_numbers(by_device)}); devices {_numbers(missing)} are not there",
            "name devices that exist with --devices; a chip that vanished needs a look at: npu-smi info -m; dmesg",
        )
    else:
        yield ok("npu.count", f"{len(by_device)} chips, {len(options.devices)} will be used")
    chips = [by_device[device] for device in options.devices if device in by_device]
    yield from check_health(chips)
    yield from check_free(chips, table)
    yield from check_device_memory(chips)


def _npu_table(machine: Machine) -> Generator[Finding, None, NpuTable | None]:
    result = machine.run("npu-smi", "info")
    if result is None:
        yield error("npu.smi", "npu-smi is not installed", INSTALL_DRIVER)
        return None
    if result.status != 0:
        last_line = (result.output.strip().splitlines() or ["no output"])[-1]
        yield error(
            "npu.smi",
            f"npu-smi info ends with status {result.status}: {last_line}",
            "in a container mount the driver directory and npu-smi; on the host reload or reinstall the driver",
        )
        return None
    table = parse_npu_smi(result.output)
    if not table.chips:
        yield error("npu.smi", "npu-smi info lists no chip", INSTALL_DRIVER)
        return None
    yield ok("npu.smi", f"npu-smi {table.version}")
    return table


def check_device_files(machine: Machine, devices: tuple[int, ...]) -> Iterator[Finding]:
    """Device files exist and this user may use them."""
    paths = [*MANAGEMENT_DEVICES, *(f"/dev/davinci{device}" for device in devices)]
    missing = [path for path in paths if not machine.exists(path)]
    if missing:
        yield error(
            "npu.device_files",
            f"missing: {', '.join(missing)}",
            "in a container pass them with --device (docker/compose.yaml does) or use the Ascend Docker Runtime; "
            "on the host the driver is not loaded",
        )
    denied = [path for path in paths if path not in missing and not machine.usable_device(path)]
    if denied:
        yield error(
            "npu.permission",
            f"this user may not open {', '.join(denied)}",
            "join the group that owns them: usermod -aG HwHiAiUser USER; in a container --group-add "
            "$(stat -c %g /dev/davinci0)",
        )
    if not missing and not denied:
        yield ok("npu.device_files", f"{len(paths)} device files usable")


def check_health(chips: list[NpuChip]) -> Iterator[Finding]:
    """Every chip says OK."""
    sick = [chip for chip in chips if chip.health != "OK"]
    for chip in sick:
        yield error(
            "npu.health",
            f"device {chip.device} ({chip.name}, {chip.bus_id}) reports {chip.health}",
            f"npu-smi info -t health -i {chip.card} -c {chip.chip}; then reset it while idle: "
            f"npu-smi set -t reset -i {chip.card} -c {chip.chip}",
        )
    if chips and not sick:
        yield ok("npu.health", f"all {len(chips)} chips report OK")


def check_free(chips: list[NpuChip], table: NpuTable) -> Iterator[Finding]:
    """No other process holds a chip, and no memory is lost to a dead one."""
    busy = False
    for chip in chips:
        holders = [p for p in table.processes if (p.card, p.chip) == (chip.card, chip.chip)]
        for process in holders:
            busy = True
            yield error(
                "npu.busy",
                f"device {chip.device} is used by process {process.pid} ({process.name}, {gibibytes(process.memory)})",
                f"stop process {process.pid}; a worker left by a killed server ends with: kill -9 {process.pid}",
            )
        if not holders and chip.memory_used > FREE_DEVICE_OVERHEAD:
            busy = True
            yield error(
                "npu.leaked_memory",
                f"device {chip.device} has {gibibytes(chip.memory_used)} in use and npu-smi names no process",
                "the holder may live in another container (look there for python processes); "
                f"otherwise reset the idle chip: npu-smi set -t reset -i {chip.card} -c {chip.chip}",
            )
    if chips and not busy:
        yield ok("npu.busy", "all chips are free")


def check_device_memory(chips: list[NpuChip]) -> Iterator[Finding]:
    """The chips are large enough for an eighth of the model."""
    small = [chip for chip in chips if chip.memory_total < MINIMUM_DEVICE_MEMORY]
    if small:
        yield warning(
            "npu.memory",
            f"devices {_numbers(chip.device for chip in small)} have {gibibytes(small[0].memory_total)}; "
            f"DeepSeek V4 Flash on eight chips wants {gibibytes(MINIMUM_DEVICE_MEMORY)} each",
            "use chips with 64 GB of HBM, or sixteen devices with DSpark",
        )
    elif chips:
        yield ok("npu.memory", f"{gibibytes(min(chip.memory_total for chip in chips))} of HBM a chip")


def _numbers(devices: Iterable[int]) -> str:
    return ", ".join(str(device) for device in sorted(devices))
