"""Interpreter, CANN, torch, torch_npu and upstream's packages: present, and made for each other."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dsv4.doctor.findings import Finding, error, ok, warning
from dsv4.doctor.machine import Machine

SUPPORTED_PYTHON = ((3, 10), (3, 13))
MINIMUM_GLIBC = (2, 35)
"""The tritonserver binary of the nvidia-pytriton wheel is built for manylinux_2_35."""

MINIMUM_CANN: dict[tuple[int, ...], tuple[int, int]] = {(2, 7): (8, 2), (2, 8): (8, 3), (2, 9): (8, 5), (2, 10): (9, 0)}
"""torch_npu minor version -> oldest CANN release that it is published for."""

DRIVER_VERSION_FILE = "/usr/local/Ascend/driver/version.info"
CANN_ROOTS = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/latest")
COMPATIBILITY = "torch_npu, torch and CANN are released as a set: see the release table of torch_npu (Ascend Extension)"

OBSOLETE_VARIABLES = {
    "PTO2_OP_EXECUTE_TIMEOUT_US": "SIMPLER_OP_EXECUTE_TIMEOUT_US",
    "PTO2_STREAM_SYNC_TIMEOUT_MS": "SIMPLER_STREAM_SYNC_TIMEOUT_MS",
    "PTO2_SCHEDULER_TIMEOUT_MS": "SIMPLER_SCHEDULER_TIMEOUT_MS",
}


def check_interpreter(machine: Machine) -> Iterator[Finding]:
    """Python has a Triton stub, and the C library runs tritonserver."""
    platform = machine.platform
    version = ".".join(map(str, platform.python))
    oldest, newest = SUPPORTED_PYTHON
    if oldest <= platform.python[:2] <= newest:
        yield ok("python.version", f"Python {version} on {platform.architecture}")
    else:
        yield error(
            "python.version",
            f"Python {version}: Triton's Python backend has stubs for 3.{oldest[1]} to 3.{newest[1]}",
            "make setup PYTHON=python3.11",
        )
    glibc = numbers(platform.glibc)
    if not glibc:
        yield error("system.glibc", "this system has no GNU C library", "use Debian 12, Ubuntu 22.04 or newer")
    elif glibc[:2] < MINIMUM_GLIBC:
        yield error(
            "system.glibc",
            f"glibc {platform.glibc} is older than {'.'.join(map(str, MINIMUM_GLIBC))}, which tritonserver needs",
            "use Debian 12, Ubuntu 22.04 or newer, or the image",
        )
    else:
        yield ok("system.glibc", f"glibc {platform.glibc}")


def check_torch(machine: Machine) -> Iterator[Finding]:
    """torch is installed."""
    version = machine.distribution_version("torch")
    if version is None:
        yield error("torch.version", "torch is not installed", "make setup")
    else:
        yield ok("torch.version", f"torch {version}")


def check_driver(machine: Machine) -> Iterator[Finding]:
    """The kernel driver says its version."""
    version = field(machine.read_text(DRIVER_VERSION_FILE), "Version")
    if version is None:
        yield error(
            "driver.version",
            f"{DRIVER_VERSION_FILE} is not there",
            "install the Ascend driver on the host; in a container mount /usr/local/Ascend/driver read-only",
        )
    else:
        yield ok("driver.version", f"Ascend driver {version}")


def check_cann(machine: Machine) -> Iterator[Finding]:
    """CANN is installed and its environment is set."""
    version = cann_version(machine)
    if version is None:
        yield error(
            "cann.version",
            f"no CANN found in ASCEND_HOME_PATH or {', '.join(CANN_ROOTS)}",
            "install the CANN toolkit, or use a CANN image as the base (docker/Dockerfile)",
        )
        return
    yield ok("cann.version", f"CANN {version}")
    if not machine.environment.get("ASCEND_HOME_PATH"):
        yield error(
            "cann.environment",
            "CANN is installed, but ASCEND_HOME_PATH is not set: its libraries will not be found",
            "source /usr/local/Ascend/ascend-toolkit/set_env.sh before dsv4 serve",
        )


def check_torch_npu(machine: Machine) -> Iterator[Finding]:
    """torch_npu fits torch exactly and CANN at least."""
    version = machine.distribution_version("torch-npu")
    if version is None:
        yield error(
            "torch_npu.version",
            "torch_npu is not installed",
            "pip install torch-npu==X with X the version of torch that belongs to your CANN; " + COMPATIBILITY,
        )
        return
    torch = machine.distribution_version("torch")
    if torch is not None and numbers(torch)[:3] != numbers(version)[:3]:
        yield error(
            "torch_npu.torch",
            f"torch_npu {version} does not fit torch {torch}: the first three numbers must be equal",
            f"pip install torch=={'.'.join(map(str, numbers(version)[:3]))}",
        )
    cann = cann_version(machine)
    needed = MINIMUM_CANN.get(numbers(version)[:2])
    if needed is None:
        yield warning("torch_npu.cann", f"torch_npu {version} is not in our table", COMPATIBILITY)
    elif cann is not None and numbers(cann)[:2] < needed:
        yield error(
            "torch_npu.cann",
            f"torch_npu {version} is made for CANN {'.'.join(map(str, needed))} or newer, found {cann}",
            COMPATIBILITY,
        )
    else:
        yield ok("torch_npu.version", f"torch_npu {version}")


def check_pypto(machine: Machine) -> Iterator[Finding]:
    """Upstream's serving package and its compiler are importable, and are the right projects."""
    if machine.has_module("pypto_serving"):
        yield ok("pypto.serving", "pypto_serving found")
    else:
        yield error(
            "pypto.serving",
            "pypto_serving is not importable",
            "put a pypto-serving checkout on PYTHONPATH, or build the image with --build-context upstream=DIRECTORY",
        )
    for name in ("pypto", "simpler"):
        if not machine.has_module(name):
            yield error(
                f"pypto.{name}",
                f"{name} is not importable",
                f"install upstream's {name} from its own sources; PyPI's package of this name is another project",
            )
        else:
            yield ok(f"pypto.{name}", f"{name} {machine.distribution_version(name) or '(from a path)'}")
    root = machine.environment.get("PYPTO_LIB_ROOT")
    if root and not machine.exists(root):
        yield error("pypto.lib_root", f"PYPTO_LIB_ROOT={root} does not exist", "point it at the pypto-lib checkout")


def check_environment(machine: Machine) -> Iterator[Finding]:
    """Variables that have no effect any more, or a harmful one."""
    for old, new in OBSOLETE_VARIABLES.items():
        if old in machine.environment:
            yield warning("environment.obsolete", f"{old} is set, but nothing reads it any more", f"set {new} instead")
    if machine.environment.get("PYPTO_PROG_BUILD_DIR") and machine.environment.get("PYPTO_CACHE") == "1":
        yield warning(
            "environment.build_directory",
            "PYPTO_PROG_BUILD_DIR is set together with PYPTO_CACHE=1: naming a build directory bypasses the cache, "
            "so every start compiles again",
            "unset PYPTO_PROG_BUILD_DIR",
        )
    directory = machine.environment.get("PYPTO_CACHE_DIR")
    if directory and not machine.exists(directory):
        yield warning(
            "environment.cache_directory",
            f"PYPTO_CACHE_DIR={directory} does not exist yet: the first start will compile all kernels",
            f"mkdir -p {directory} on a file system that survives restarts",
        )


def cann_version(machine: Machine) -> str | None:
    """Version of the CANN toolkit, such as `8.2.RC1`; None when there is none."""
    home = machine.environment.get("ASCEND_HOME_PATH")
    architecture = "aarch64-linux" if machine.platform.architecture == "aarch64" else "x86_64-linux"
    for root in (*((home,) if home else ()), *CANN_ROOTS):
        for name in (
            "ascend_toolkit_install.info",
            f"{architecture}/ascend_toolkit_install.info",
            "share/info/runtime/version.info",
            "runtime/version.info",
        ):
            text = machine.read_text(f"{root}/{name}")
            version = field(text, "version") or field(text, "Version")
            if version is not None:
                return version
    return None


def field(text: str | None, name: str) -> str | None:
    """Value of a `name=value` line."""
    match = re.search(rf"^{name}\s*=\s*\[?([^\s\]]+)", text or "", re.MULTILINE)
    return match[1] if match else None


def numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: `2.10.0.post4` -> (2, 10, 0), `8.2.RC1` -> (8, 2)."""
    found: list[int] = []
    for part in version.split("+")[0].split("."):
        if not part.isdecimal():
            break
        found.append(int(part))
    return tuple(found)
