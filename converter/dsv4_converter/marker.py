"""The marker file: what was converted from what, and the journal that a resumed run trusts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsv4.checkpoint.safetensors_file import FileIdentity
from dsv4.errors import CheckpointError

from dsv4_converter.json_files import read_json_object
from dsv4_converter.output_files import write_file

MARKER_NAME = ".pypto-w8a8-conversion.json"
MARKER_FORMAT = "pypto-deepseek-v4-w8a8-v2"


@dataclass(frozen=True)
class ShardRecord:
    """One finished shard.

    Attributes:
        source_sha256: hex digest of the source shard's bytes as they were converted.
        output_bytes: size of the output shard.
        output_xxh3: hex digest of the output shard, see `dsv4_converter.shard.ShardDigest`.
        lossless: ``layer kind`` -> [rows, lossless rows].
        source_identity: the source file's identity when it was read; kept while the conversion is incomplete.
    """

    source_sha256: str
    output_bytes: int
    output_xxh3: str
    lossless: dict[str, tuple[int, int]]
    source_identity: FileIdentity | None = None


@dataclass
class Marker:
    """Content of the marker file. ``source_shards_sha256`` is None until every shard was read."""

    input_dir: str
    source_config_sha256: str
    source_index_sha256: str
    rounding: str
    source_shards_sha256: str | None = None
    complete: bool = False
    shards: dict[str, ShardRecord] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Write the marker atomically and durably."""
        records = {}
        for name, record in sorted(self.shards.items()):
            values = asdict(record)
            if self.complete or record.source_identity is None:
                # A finished marker holds content only, so that equal conversions have equal markers.
                del values["source_identity"]
            records[name] = values
        content = {
            "format": MARKER_FORMAT,
            "input_dir": self.input_dir,
            "source_config_sha256": self.source_config_sha256,
            "source_index_sha256": self.source_index_sha256,
            "source_shards_sha256": self.source_shards_sha256,
            "complete": self.complete,
            "rounding": self.rounding,
            "shards": records,
        }
        write_file(directory / MARKER_NAME, (json.dumps(content, indent=2) + "\n").encode())

    @classmethod
    def read(cls, directory: Path) -> Marker:
        """Read a marker. Raises CheckpointError when it is missing, of another format or broken."""
        path = directory / MARKER_NAME
        content, _ = read_json_object(path)
        if content.get("format") != MARKER_FORMAT:
            raise CheckpointError(f"{path}: format is {content.get('format')!r}, expected {MARKER_FORMAT!r}")
        try:
            return cls(
                input_dir=_text(content, "input_dir"),
                source_config_sha256=_text(content, "source_config_sha256"),
                source_index_sha256=_text(content, "source_index_sha256"),
                # Markers of other tools with this format have no rounding: they know one rule only.
                rounding=_text(content, "rounding") if "rounding" in content else "rtn",
                source_shards_sha256=content.get("source_shards_sha256"),
                complete=content.get("complete") is True,
                shards={name: _record(value) for name, value in content.get("shards", {}).items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path}: broken marker: {error}") from error


def _text(content: Mapping[str, Any], key: str) -> str:
    value = content[key]
    if not isinstance(value, str):
        raise ValueError(f"{key} is no string")
    return value


def _record(value: Mapping[str, Any]) -> ShardRecord:
    identity = value.get("source_identity")
    return ShardRecord(
        source_sha256=_text(value, "source_sha256"),
        output_bytes=int(value["output_bytes"]),
        output_xxh3=_text(value, "output_xxh3"),
        lossless={key: (int(rows), int(lossless)) for key, (rows, lossless) in value["lossless"].items()},
        source_identity=FileIdentity(**identity) if identity is not None else None,
    )


def combined_sha256(shard_digests: Mapping[str, str]) -> str:
    """One digest over all shards: for each name in order, the name and the raw digest of the file."""
    digest = hashlib.sha256()
    for name in sorted(shard_digests):
        digest.update(name.encode())
        digest.update(bytes.fromhex(shard_digests[name]))
    return digest.hexdigest()


def portable_path(path: Path) -> str:
    """The path as text, whatever the locale's encoding is."""
    return os.fsencode(path).decode("utf-8", "surrogateescape")
