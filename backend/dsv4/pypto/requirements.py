"""From the engine's flags to PyPTO's, and whether this machine can run it at all."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from dsv4.config import EngineConfig, ModelConfig
from dsv4.default_model import resolve_model
from dsv4.doctor.machine import LocalMachine, Machine
from dsv4.doctor.npu_checks import MANAGEMENT_DEVICES
from dsv4.errors import ConfigurationError, EngineStartError
from dsv4.pypto.options import ENGINE_FLAGS, PyptoOptions

NO_DEVICE_CHECK_VARIABLE = "DSV4_PYPTO_NO_DEVICE_CHECK"
"""Set to 1 where upstream's worker runs on something other than NPUs, such as a simulator."""


def check_devices(config: EngineConfig, machine: Machine | None = None) -> None:
    """Raises EngineStartError with the one reason why there can be no NPU engine here."""
    machine = machine or LocalMachine()
    if machine.environment.get(NO_DEVICE_CHECK_VARIABLE) == "1":
        return
    devices = [int(device) for device in (config.devices or "").split(",") if device.strip()]
    paths = [*MANAGEMENT_DEVICES, *(f"/dev/davinci{device}" for device in devices)]
    missing = [path for path in paths if not machine.exists(path)]
    if len(missing) == len(paths):
        raise EngineStartError(
            "backend npu: this machine has no Ascend NPU (no /dev/davinci*); use --backend cpu, or see dsv4 doctor"
        )
    if missing:
        raise EngineStartError(f"backend npu: {', '.join(missing)} missing; see dsv4 doctor --backend npu")
    denied = [path for path in paths if not machine.usable_device(path)]
    if denied:
        raise EngineStartError(
            f"backend npu: this user may not open {', '.join(denied)}; see dsv4 doctor --backend npu"
        )


def options_of(config: EngineConfig, *, progress: Callable[[str], None] | None = None) -> PyptoOptions:
    """The PyPTO engine's options for our flags. Raises CheckpointError or ConfigurationError."""
    if config.model is None:
        raise ConfigurationError("--backend npu needs --model: the kernels are built for DeepSeek V4 Flash")
    directory = resolve_model(config.model, progress=progress)
    values: dict[str, Any] = dataclasses.asdict(config)
    flags = {name: values[name] for name in ENGINE_FLAGS if values.get(name) is not None}
    flags["ep"] = config.ep if config.ep is not None else config.dp
    flags["npu_memory_utilization"] = config.memory_utilization
    flags["max_model_len"] = config.resolve_max_model_len(ModelConfig.from_directory(directory).max_position_embeddings)
    if config.profile_output is not None:
        flags["profile"] = True
    return PyptoOptions(
        model=os.fspath(directory),
        flags=flags,
        max_queued_requests=config.max_queued_requests,
        start_timeout_seconds=config.start_timeout_seconds,
        step_timeout_seconds=config.hang_timeout_seconds,
    )
