"""Opening a W8A8 checkpoint for prepacking or verification."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.checkpoint.names import expected_tensors, redundant_tensors
from dsv4.checkpoint.safetensors_file import SafetensorsFile
from dsv4.errors import CheckpointError

from dsv4_converter.dimensions import Dimensions
from dsv4_converter.json_files import read_json_object, read_weight_map
from dsv4_converter.marker import MARKER_NAME, Marker
from dsv4_converter.source import CONFIG_NAME, INDEX_NAME, StoredTensor, check_tensor, match_index


@dataclass
class ServedCheckpoint:
    """A W8A8 checkpoint whose headers were checked against its config.json, with every shard open.

    Attributes:
        marker: of the conversion that made it; None where another tool did.
    """

    directory: Path
    config: dict[str, Any]
    dimensions: Dimensions
    weight_map: dict[str, str]
    shards: dict[str, SafetensorsFile]
    tensors: dict[str, StoredTensor]
    marker: Marker | None

    @property
    def total_bytes(self) -> int:
        return sum(shard.size for shard in self.shards.values())

    def read(self, name: str) -> bytes:
        """All bytes of a tensor."""
        return self.shards[self.tensors[name].shard].read(name)

    def close(self) -> None:
        for shard in self.shards.values():
            shard.close()

    def __enter__(self) -> ServedCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_served(directory: str | os.PathLike[str]) -> ServedCheckpoint:
    """Open and check a W8A8 checkpoint.

    Raises:
        CheckpointError, ConfigurationError: it is not converted, its conversion is incomplete, or a file is wrong.
    """
    path = Path(directory)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory")
    config, _ = read_json_object(path / CONFIG_NAME)
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method != "compressed-tensors":
        raise CheckpointError(
            f"{path / CONFIG_NAME}: quant_method is {method!r}, not compressed-tensors; convert it first with "
            "dsv4 convert"
        )
    marker = Marker.read(path) if (path / MARKER_NAME).exists() else None
    if marker is not None and not marker.complete:
        raise CheckpointError(f"{path / MARKER_NAME}: the conversion is incomplete; finish it with --resume")
    dimensions = Dimensions.from_config(config, str(path / CONFIG_NAME))
    weight_map, _ = read_weight_map(path / INDEX_NAME)
    shards: dict[str, SafetensorsFile] = {}
    try:
        for name in sorted(set(weight_map.values())):
            shards[name] = SafetensorsFile(path / name)
        tensors = match_index(path, weight_map, shards)
        _check_tensors(path, dimensions, tensors)
    except BaseException:
        for shard in shards.values():
            shard.close()
        raise
    return ServedCheckpoint(path, config, dimensions, weight_map, shards, tensors, marker)


def _check_tensors(directory: Path, dimensions: Dimensions, tensors: dict[str, StoredTensor]) -> None:
    expected = expected_tensors(dimensions, "w8a8")
    for name, form in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{directory / INDEX_NAME}: tensor {name} is missing (config.json asks for it)")
        check_tensor(directory, tensors[name], form)
    unknown = tensors.keys() - expected.keys() - redundant_tensors(dimensions)
    if unknown:
        name = min(unknown)
        raise CheckpointError(
            f"{directory / tensors[name].shard}: tensor {name} does not belong to this model according to config.json"
        )
