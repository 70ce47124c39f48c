"""Is there a prepacked sidecar, does it belong to these shards, and is it in memory?

The loader maps a sidecar only when at least 95 % of its sampled pages are in the page cache, because reading it by
page faults is slower than packing the shards again. Its fingerprint covers names, sizes and modification times of the
shards, so a copy that changes the times makes it stale.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from dsv4.checkpoint.safetensors_file import SafetensorsFile
from dsv4.config import ModelConfig
from dsv4.doctor.checkpoint_checks import INDEX_NAME, shard_paths
from dsv4.doctor.findings import Finding, gibibytes, ok, warning
from dsv4.doctor.machine import Machine
from dsv4.errors import CheckpointError, ConfigurationError

SIDECAR_FORMAT = "pypto-deepseek-v4-stacked-v1"
HOT_RESIDENCY = 0.95


def sidecar_path(directory: Path, ranks: int) -> Path:
    """Where the loader looks for the sidecar of so many ranks."""
    return directory / f"pypto-deepseek-v4-stacked-r{ranks}.safetensors"


def check_sidecar(machine: Machine, directory: Path, ranks: int) -> Iterator[Finding]:
    """Absent, stale, cold or hot."""
    path = sidecar_path(directory, ranks)
    prepack = f"dsv4 prepack {directory} --ranks {ranks}"
    if not path.exists():
        yield warning("sidecar.present", f"no {path.name}: each start packs the weights anew", prepack)
        return
    try:
        config = ModelConfig.from_directory(directory)
        fingerprint = source_fingerprint(directory, config, ranks)
        with SafetensorsFile(path) as file:
            metadata, size = file.metadata, file.size
    except (CheckpointError, ConfigurationError) as failure:
        yield warning("sidecar.readable", str(failure), f"{prepack} --force")
        return
    if metadata.get("format") != SIDECAR_FORMAT:
        yield warning("sidecar.format", f"{path.name} has format {metadata.get('format')!r}", f"{prepack} --force")
        return
    if metadata.get("source_fingerprint") != fingerprint:
        yield warning(
            "sidecar.stale",
            f"{path.name} was made from other shards (or their modification times changed): it is ignored",
            f"{prepack} --force",
        )
        return
    yield from check_residency(machine, path, size)


def check_residency(machine: Machine, path: Path, size: int) -> Iterator[Finding]:
    """Hot enough to be mapped, or able to become so."""
    total, _ = machine.memory()
    residency = machine.page_cache_residency(path)
    if residency is not None and residency >= HOT_RESIDENCY:
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
            f"{path.name} is valid but {state}: below {HOT_RESIDENCY:.0%} it is ignored",
            f"warm it before the start: cat {path} >/dev/null",
        )


def source_fingerprint(directory: Path, config: ModelConfig, ranks: int) -> str:
    """The fingerprint that a sidecar of these shards carries (layout `pypto-deepseek-v4-stacked-v1`).

    Raises CheckpointError when the index or a shard is missing.
    """
    shards = shard_paths(directory)
    try:
        weight_map = json.loads((directory / INDEX_NAME).read_text(encoding="utf-8"))["weight_map"]
        statuses = [path.stat() for path in shards]
    except (OSError, ValueError, KeyError) as failure:
        raise CheckpointError(f"{directory}: {failure}") from failure
    document = {
        "format": SIDECAR_FORMAT,
        "ranks": ranks,
        "n_routed_experts": config.n_routed_experts,
        "compress_ratios": list(config.compress_ratios[: config.num_hidden_layers]),
        "num_hash_layers": config.num_hash_layers,
        "weight_map": sorted([name, file] for name, file in weight_map.items()),
        "source_files": [
            [path.name, status.st_size, status.st_mtime_ns] for path, status in zip(shards, statuses, strict=True)
        ],
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
