"""All checks of a planned deployment, in the order in which one would mend things."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dsv4.doctor.checkpoint_checks import check_checkpoint
from dsv4.doctor.findings import Finding, error, ok
from dsv4.doctor.machine import Machine
from dsv4.doctor.npu_checks import check_npus, has_npu_traces
from dsv4.doctor.options import NPU_BACKENDS, DoctorOptions
from dsv4.doctor.resource_checks import check_cache_directory, check_limits, check_ports, check_shared_memory
from dsv4.doctor.sidecar_checks import check_sidecar
from dsv4.doctor.software_checks import (
    check_cann,
    check_driver,
    check_environment,
    check_interpreter,
    check_pypto,
    check_torch,
    check_torch_npu,
)
from dsv4.doctor.triton_checks import check_triton, wheel_directory


def examine(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """Run every check that fits the deployment and yield the findings as they are made."""
    npu = options.backend in NPU_BACKENDS or (options.backend == "auto" and has_npu_traces(machine))
    yield from check_interpreter(machine)
    yield from check_torch(machine)
    yield from check_triton(machine, wheel_directory())
    if npu:
        yield from check_driver(machine)
        yield from check_npus(machine, options)
        yield from check_cann(machine)
        if options.backend == "torch-npu":
            yield from check_torch_npu(machine)
        else:
            yield from check_pypto(machine)
        yield from check_environment(machine)
    else:
        yield ok("backend", "no NPU is asked for or found: the reference engine runs on this machine's processor")
    yield from check_shared_memory(machine, npu=npu)
    yield from check_limits(machine, npu=npu)
    if options.cache_directory is not None:
        yield from check_cache_directory(machine, options.cache_directory)
    yield from check_ports(machine, options)
    if options.model is not None:
        yield from _check_model(machine, options.model, len(options.devices), npu=npu)


def _check_model(machine: Machine, directory: Path, ranks: int, *, npu: bool) -> Iterator[Finding]:
    if not directory.is_dir():
        yield error("checkpoint.files", f"{directory} is not a directory", "name a checkpoint directory with --model")
        return
    yield from check_checkpoint(machine, directory, npu=npu)
    if npu:
        yield from check_sidecar(machine, directory, ranks)
