"""Memory, shared memory, limits, disk space and ports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dsv4.doctor.findings import Finding, error, gibibytes, ok, warning
from dsv4.doctor.machine import Machine
from dsv4.doctor.options import DoctorOptions

MINIMUM_OPEN_FILES = 4096
MINIMUM_SHARED_MEMORY = 256 << 20
"""Triton's Python backend keeps its requests and responses in shared memory; Docker gives 64 MB by default."""

MINIMUM_SHARED_MEMORY_NPU = 16 << 30
"""Upstream's worker keeps static tensors and every dispatch buffer there as well: several GiB."""

MINIMUM_CACHE_SPACE = 1 << 30


def check_shared_memory(machine: Machine, *, npu: bool) -> Iterator[Finding]:
    """`/dev/shm` is large enough."""
    space = machine.space("/dev/shm")
    needed = MINIMUM_SHARED_MEMORY_NPU if npu else MINIMUM_SHARED_MEMORY
    remedy = f"docker run --shm-size={'64g' if npu else '1g'}; Kubernetes: an emptyDir of medium Memory at /dev/shm"
    if space is None:
        yield error("memory.shm", "/dev/shm is not there", remedy)
    elif space.free < needed:
        yield error(
            "memory.shm",
            f"/dev/shm has {gibibytes(space.free)} free of {gibibytes(space.total)}; needed are {gibibytes(needed)}",
            f"{remedy}; left-overs of dead servers: ls /dev/shm",
        )
    else:
        yield ok("memory.shm", f"/dev/shm has {gibibytes(space.free)} free")


def check_limits(machine: Machine, *, npu: bool) -> Iterator[Finding]:
    """Open files, and locked memory where devices pin host memory."""
    open_files = machine.limit("NOFILE")
    if 0 <= open_files < MINIMUM_OPEN_FILES:
        yield warning(
            "limits.open_files",
            f"{open_files} open files are allowed: that many minus some connections fit",
            "ulimit -n 65536 (LimitNOFILE= in systemd, --ulimit nofile=65536 in docker)",
        )
    else:
        yield ok("limits.open_files", f"{'unlimited' if open_files < 0 else open_files} open files")
    if npu and machine.limit("MEMLOCK") >= 0:
        yield warning(
            "limits.locked_memory",
            f"locked memory is limited to {gibibytes(machine.limit('MEMLOCK'))}; pinned host buffers may fail",
            "ulimit -l unlimited (--ulimit memlock=-1 in docker)",
        )


def check_cache_directory(machine: Machine, directory: Path) -> Iterator[Finding]:
    """There is room for compiled kernels, converted models and Triton's backend directory."""
    existing = directory
    while machine.space(str(existing)) is None and existing != existing.parent:
        existing = existing.parent
    space = machine.space(str(existing))
    if space is not None and space.free < MINIMUM_CACHE_SPACE:
        yield error(
            "disk.cache",
            f"{directory} has {gibibytes(space.free)} left; {gibibytes(MINIMUM_CACHE_SPACE)} are needed",
            "make room or name another directory with DSV4_CACHE_DIR",
        )
    elif not machine.usable_device(str(existing)):
        yield error(
            "disk.cache",
            f"{existing} cannot be written by this user",
            "name a writable directory with DSV4_CACHE_DIR",
        )
    elif space is not None:
        yield ok("disk.cache", f"{directory}: {gibibytes(space.free)} free")


def check_ports(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """Nothing listens yet where the server will."""
    taken = [port for port in options.ports if not machine.port_is_free(options.host, port)]
    for port in taken:
        yield error(
            "network.port",
            f"port {port} of {options.host} is in use",
            f"see who holds it: ss -ltnp 'sport = :{port}'; or choose another port",
        )
    if not taken:
        yield ok("network.port", f"ports {', '.join(map(str, options.ports))} are free")
