"""The environment that upstream reads, made right before its modules are imported.

Passed through as they are: `PYPTO_LIB_ROOT`, `PYPTO_CACHE`, `PYPTO_CACHE_DIR`, `PYPTO_CACHE_READONLY`,
`PYPTO_RUNTIME_LOG`, `PYPTO_RUNTIME_LOG_SYNC`, `SIMPLER_*`, `PTOAS_ROOT`, `PTO_ISA_ROOT`, and CANN's own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from dsv4.pypto.arguments import RING_FLAGS
from dsv4.pypto.options import PyptoOptions

_logger = logging.getLogger(__name__)

RECORDING_VARIABLES = ("SA_PROFILE_OUTPUT", "SA_PROFILE_LEVEL")
"""If set, any first use of upstream's profiler starts recording and deletes older fragments."""


def upstream_environment(
    environment: Mapping[str, str], options: PyptoOptions, *, ring_flags: bool, build_directory: Path
) -> dict[str, str | None]:
    """Changes to the environment: a value to set, None to remove.

    Args:
        ring_flags: whether upstream's parser takes the ring sizes; older ones read them from the environment.
        build_directory: writable directory for versions that otherwise build into the current directory.
    """
    changes: dict[str, str | None] = dict.fromkeys(name for name in RECORDING_VARIABLES if name in environment)
    changes["PYPTO_WORKER_INIT_TIMEOUT"] = f"{options.start_timeout_seconds:g}"
    # Upstream's default is 20 minutes. Ours ends the wait first; upstream's is the second line.
    changes["SERVING_WORKER_STEP_TIMEOUT"] = f"{options.step_timeout_seconds * 2:g}"
    if not ring_flags:
        for flag in RING_FLAGS:
            value = options.flags.get(flag)
            if value is not None:
                changes["PTO2_" + flag.upper()] = str(value)
        if "PYPTO_PROG_BUILD_DIR" not in environment:
            changes["PYPTO_PROG_BUILD_DIR"] = str(build_directory)
    elif environment.get("PYPTO_PROG_BUILD_DIR"):
        _logger.warning(
            "PYPTO_PROG_BUILD_DIR is set: naming a build directory bypasses the kernel cache, so every start compiles "
            "again; unset it and use PYPTO_CACHE=1 with PYPTO_CACHE_DIR"
        )
    return changes


def apply(environment: MutableMapping[str, str], changes: Mapping[str, str | None]) -> None:
    """Carry out the changes of `upstream_environment`."""
    for name, value in changes.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
