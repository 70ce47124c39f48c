"""Everything the checks ask of a machine, behind one interface, so that every fault can be tested anywhere."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import mmap
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dsv4.checkpoint.sidecar import resident_share

COMMAND_TIMEOUT_SECONDS = 30.0
_DIRECT_READ_BYTES = 8 << 20


@dataclass(frozen=True)
class CommandResult:
    """Exit status and output of a finished program; status 124 means that it did not answer in time."""

    status: int
    output: str


@dataclass(frozen=True)
class FileSystemSpace:
    """Size and free space of a file system, in bytes."""

    total: int
    free: int


@dataclass(frozen=True)
class Platform:
    """The interpreter and the C library that run this process.

    Attributes:
        glibc: version of the GNU C library; empty on other C libraries.
        library_directory: where the interpreter's own shared library lies, if it has one.
    """

    python: tuple[int, int, int]
    architecture: str
    glibc: str
    library_directory: str


class Machine(Protocol):
    """What the checks may ask."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables."""

    @property
    def platform(self) -> Platform:
        """Interpreter and C library."""

    def exists(self, path: str) -> bool:
        """Whether a path exists."""

    def usable_device(self, path: str) -> bool:
        """Whether this user may read and write a device file."""

    def read_text(self, path: str) -> str | None:
        """Contents of a small text file; None when it cannot be read."""

    def run(self, *command: str) -> CommandResult | None:
        """Run a program; None when it is not installed."""

    def distribution_version(self, name: str) -> str | None:
        """Version of an installed Python distribution."""

    def has_module(self, name: str) -> bool:
        """Whether a top-level Python module can be found; it is not imported."""

    def memory(self) -> tuple[int, int]:
        """Total and available main memory in bytes, within the limit of this container."""

    def space(self, path: str) -> FileSystemSpace | None:
        """Space of the file system that holds a path; None when the path does not exist."""

    def limit(self, name: str) -> int:
        """Soft limit of a resource (`NOFILE`, `MEMLOCK`); -1 is unlimited."""

    def port_is_free(self, host: str, port: int) -> bool:
        """Whether a TCP port can be bound."""

    def read_speed(self, path: Path, num_bytes: int) -> float | None:
        """Bytes per second of a sequential read that bypasses the page cache; None where that is not possible."""

    def page_cache_residency(self, path: Path) -> float | None:
        """Share of a file's pages that are in memory, by samples; None where the system cannot tell."""


class LocalMachine:
    """The machine this process runs on."""

    @property
    def environment(self) -> Mapping[str, str]:
        return os.environ

    @property
    def platform(self) -> Platform:
        library, version = platform.libc_ver()
        return Platform(
            python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
            architecture=platform.machine(),
            glibc=version if library == "glibc" else "",
            library_directory=str(sysconfig.get_config_var("LIBDIR") or ""),
        )

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def usable_device(self, path: str) -> bool:
        return os.access(path, os.R_OK | os.W_OK)

    def read_text(self, path: str) -> str | None:
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def run(self, *command: str) -> CommandResult | None:
        if shutil.which(command[0]) is None:
            return None
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=COMMAND_TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return CommandResult(124, f"no answer within {COMMAND_TIMEOUT_SECONDS:.0f} s")
        except OSError as failure:
            return CommandResult(126, failure.strerror or str(failure))
        return CommandResult(done.returncode, done.stdout)

    def distribution_version(self, name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def has_module(self, name: str) -> bool:
        return importlib.util.find_spec(name) is not None

    def memory(self) -> tuple[int, int]:
        host_total, host_available = _host_memory(self.read_text("/proc/meminfo") or "")
        limit = self.read_text("/sys/fs/cgroup/memory.max")
        used = self.read_text("/sys/fs/cgroup/memory.current")
        if limit is None or used is None or not limit.strip().isdecimal() or int(limit) >= host_total:
            return host_total, host_available
        return int(limit), min(host_available, max(0, int(limit) - int(used)))

    def space(self, path: str) -> FileSystemSpace | None:
        try:
            usage = shutil.disk_usage(path)
        except OSError:
            return None
        return FileSystemSpace(usage.total, usage.free)

    def limit(self, name: str) -> int:
        soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        return -1 if soft == resource.RLIM_INFINITY else soft

    def port_is_free(self, host: str, port: int) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                return False
        return True

    def read_speed(self, path: Path, num_bytes: int) -> float | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            return None
        try:
            with mmap.mmap(-1, _DIRECT_READ_BYTES) as buffer:
                began = time.perf_counter()
                done = 0
                while done < num_bytes:
                    count = os.preadv(descriptor, [buffer], done)
                    if count == 0:
                        break
                    done += count
                elapsed = time.perf_counter() - began
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return done / elapsed if done and elapsed > 0 else None

    def page_cache_residency(self, path: Path) -> float | None:
        try:
            with path.open("rb") as file:
                return resident_share(file.fileno(), os.fstat(file.fileno()).st_size)
        except (OSError, ValueError):
            return None


def _host_memory(meminfo: str) -> tuple[int, int]:
    """`MemTotal` and `MemAvailable` of `/proc/meminfo`, in bytes."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    total, available = (int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return total, available
