"""Is there a prepacked sidecar, does it belong to these shards, and is it in memory?

Whether it is sound is decided as `dsv4.checkpoint.sidecar` decides it. Upstream's loader, which the PyPTO engine
uses, is stricter in two ways: it knows the shards by names, sizes and modification times alone, so that a copy with
other times looks stale to it, and it maps a sidecar only when at least 95 % of its sampled pages are in the page cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dsv4.checkpoint.safetensors_file import SafetensorsFile
from dsv4.checkpoint.sidecar import (
    FINGERPRINT_KEY,
    HOT_SHARE,
    SIDECAR_FORMAT,
    sidecar_path,
    source_fingerprint,
    why_corrupt,
    why_stale,
)
from dsv4.config import ModelConfig
from dsv4.doctor.checkpoint_checks import read_weight_map
from dsv4.doctor.findings import Finding, gibibytes, ok, warning
from dsv4.doctor.machine import Machine
from dsv4.errors import CheckpointError, ConfigurationError


def check_sidecar(machine: Machine, directory: Path, ranks: int) -> Iterator[Finding]:
    """Absent, unusable, stale, cold or hot."""
    path = sidecar_path(directory, ranks)
    prepack = f"dsv4 prepack {directory} --ranks {ranks}"
    if not path.exists():
        yield warning("sidecar.present", f"no {path.name}: each start packs the weights anew", prepack)
        return
    try:
        with SafetensorsFile(path) as file:
            problem = _problem(file, directory, ranks)
            size = file.size
    except (CheckpointError, ConfigurationError, OSError) as failure:
        problem = ("sidecar.readable", str(failure))
    if problem is not None:
        check, text = problem
        yield warning(check, text, f"{prepack} --force")
        return
    yield from check_residency(machine, path, size)


def _problem(file: SafetensorsFile, directory: Path, ranks: int) -> tuple[str, str] | None:
    """Check and text of what keeps an existing sidecar from being mapped, whatever is in memory.

    Raises CheckpointError, ConfigurationError or OSError when the checkpoint cannot be read.
    """
    name = file.path.name
    if file.metadata.get("format") != SIDECAR_FORMAT:
        return "sidecar.format", f"{name} has format {file.metadata.get('format')!r}"
    config = ModelConfig.from_directory(directory)
    weight_map = read_weight_map(directory)
    stale = why_stale(file, directory, config, weight_map, ranks)
    if stale is not None:
        return "sidecar.stale", f"{name} is not to be used: {stale}"
    corrupt = why_corrupt(file, config, ranks)
    if corrupt is not None:
        return "sidecar.corrupt", f"{name}: {corrupt}"
    if source_fingerprint(directory, config, weight_map, ranks) != file.metadata.get(FINGERPRINT_KEY):
        return (
            "sidecar.times",
            f"{name} was made from shards of these contents, but their modification times changed since: "
            "PyPTO's loader ignores it",
        )
    return None


def check_residency(machine: Machine, path: Path, size: int) -> Iterator[Finding]:
    """Hot enough to be mapped, or able to become so."""
    total, _ = machine.memory()
    residency = machine.page_cache_residency(path)
    if residency is not None and residency >= HOT_SHARE:
        yield ok("sidecar.hot", f"{path.name} is valid and {residency:.0%} in the page cache: it will be mapped")
    elif size > total:
        yield warning(
            "sidecar.too_large",
            f"{path.name} has {gibibytes(size)}, main memory {gibibytes(total)}: it can never be hot and is ignored",
            "delete it, or give this machine more memory",
        )
    else:
        state = "cold" if residency is None else f"{residency:.0%} in the page cache"
        yield warning(
            "sidecar.cold",
            f"{path.name} is valid but {state}: below {HOT_SHARE:.0%} it is ignored",
            f"warm it before the start: cat {path} >/dev/null",
        )
