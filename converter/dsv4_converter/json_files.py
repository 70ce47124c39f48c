"""Reading JSON files whose content is not trusted."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from dsv4.checkpoint.safetensors_file import unique_keys
from dsv4.errors import CheckpointError

MAX_JSON_BYTES = 256 << 20


def read_json_object(path: Path) -> tuple[dict[str, Any], bytes]:
    """Parse a file that must hold a JSON object.

    Returns:
        the object and the raw bytes it was parsed from.

    Raises:
        CheckpointError: naming the file.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        if status.st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {status.st_size} bytes are too many for this file")
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    return parse_json_object(raw, str(path)), raw


def parse_json_object(raw: bytes, label: str) -> dict[str, Any]:
    """Parse bytes that must be a JSON object without repeated names. Raises CheckpointError starting with ``label``."""
    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{label}: holds a JSON {type(content).__name__}, expected an object")
    return content


def read_weight_map(path: Path) -> tuple[dict[str, str], bytes]:
    """Read ``model.safetensors.index.json``: tensor name -> shard file name.

    Shard names must be bare file names ending in ``.safetensors``, so that a path can never leave the directory.

    Returns:
        the map and the raw bytes of the file.

    Raises:
        CheckpointError: naming the file and the entry.
    """
    content, raw = read_json_object(path)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing or empty")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{path}: tensor {name}: shard name {shard!r} is no string")
        if shard != Path(shard).name or "\\" in shard or "\0" in shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{path}: tensor {name}: unsafe shard name {shard!r}, expected a bare file name")
        if shard.startswith("."):
            raise CheckpointError(f"{path}: tensor {name}: shard name {shard!r} is a hidden file")
    return weight_map, raw
