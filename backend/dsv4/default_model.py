"""From what the user named (or nothing) to a directory with a converted W8A8 checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsv4.errors import CheckpointError

AUTOMATIC_CONVERSION_LIMIT_BYTES = 1 << 30
"""Larger source checkpoints are not converted behind the user's back: it takes minutes and needs disk space."""


def shipped_model_directory() -> Path:
    """Where the small trained checkpoint `dsv4-nano` lies: in the checkout, or beside an installed wheel."""
    candidates = (
        Path(__file__).resolve().parents[2] / "examples" / "dsv4-nano",
        Path(sys.prefix) / "share" / "dsv4-triton" / "examples" / "dsv4-nano",
    )
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    raise CheckpointError("the shipped dsv4-nano checkpoint is not installed; name a checkpoint with --model")


def cache_directory() -> Path:
    """`DSV4_CACHE_DIR`, else `$XDG_CACHE_HOME/dsv4-triton`, else `~/.cache/dsv4-triton`."""
    explicit = os.environ.get("DSV4_CACHE_DIR")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dsv4-triton"


def resolve_model(model: str | Path | None = None, *, progress: Callable[[str], None] | None = None) -> Path:
    """Directory of a checkpoint that the engine can serve.

    `model` None means the shipped dsv4-nano. A converted checkpoint is returned as it is. A small source checkpoint
    (FP8/MXFP4) is converted once into the cache directory. Raises CheckpointError for anything else.
    """
    directory = shipped_model_directory() if model is None else Path(model)
    config = _read_config(directory)
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method == "compressed-tensors":
        return directory
    if method != "fp8":
        raise CheckpointError(
            f"{directory / 'config.json'}: quantization_config.quant_method is {method!r}; "
            "served are 'compressed-tensors' (W8A8) checkpoints, and 'fp8' source checkpoints after `dsv4 convert`"
        )
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    if size > AUTOMATIC_CONVERSION_LIMIT_BYTES:
        raise CheckpointError(
            f"{directory} is a source checkpoint (FP8/MXFP4) of {size / 2**30:.1f} GiB; convert it first: "
            f"dsv4 convert --input-dir {directory} --output-dir {directory}-w8a8"
        )
    return _converted(directory, progress)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is not a checkpoint: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return config


def _converted(source: Path, progress: Callable[[str], None] | None) -> Path:
    """The converted form of a small source checkpoint, made on first use and kept under the source's content digest."""
    from dsv4_converter import convert

    target = cache_directory() / "converted" / f"{source.name}-{_content_digest(source)}"
    if target.is_dir():
        return target
    if progress is not None:
        progress(f"converting {source} to W8A8 in {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        convert(source, staging / "model")
        try:
            os.rename(staging / "model", target)
        except OSError:
            # Another process finished the same conversion first; its result is the same bytes.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _content_digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.suffix in {".json", ".safetensors"}:
            digest.update(path.name.encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
