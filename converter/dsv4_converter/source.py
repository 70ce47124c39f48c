"""Opening a source checkpoint: everything that headers can tell is checked before a byte of output exists."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.checkpoint.names import (
    ExpectedTensor,
    WeightSpec,
    num_mtp_blocks,
    redundant_tensors,
    source_tensors,
    weights,
)
from dsv4.checkpoint.safetensors_file import SafetensorsFile, TensorEntry
from dsv4.errors import CheckpointError

from dsv4_converter.dimensions import Dimensions
from dsv4_converter.json_files import read_json_object, read_weight_map

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the source and the shard that holds it."""

    name: str
    shard: str
    entry: TensorEntry


@dataclass(frozen=True)
class SourceWeight:
    """One weight of the model as the source stores it; ``scale`` belongs to quantized weights only."""

    spec: WeightSpec
    weight: StoredTensor
    scale: StoredTensor | None


@dataclass
class SourceCheckpoint:
    """A checked source checkpoint with every shard open.

    Attributes:
        directory: resolved path.
        config: config.json as read.
        dimensions: its checked fields.
        shards: shard name -> open file, sorted by name.
        weights: every weight of the model.
        extra: tensors that are copied although no weight needs them.
        config_sha256, index_sha256: hex digests of the two JSON files.
    """

    directory: Path
    config: dict[str, Any]
    dimensions: Dimensions
    shards: dict[str, SafetensorsFile]
    weights: list[SourceWeight]
    extra: list[StoredTensor]
    config_sha256: str
    index_sha256: str

    @property
    def total_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(shard.size for shard in self.shards.values())

    def close(self) -> None:
        for shard in self.shards.values():
            shard.close()

    def __enter__(self) -> SourceCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def changed_shards(self) -> list[str]:
        """Names of shards that were replaced or written to since they were opened."""
        return [name for name, shard in self.shards.items() if not shard.unchanged()]


def open_source(directory: str | os.PathLike[str]) -> SourceCheckpoint:
    """Open and check a source checkpoint.

    Raises:
        CheckpointError, ConfigurationError: naming the file and, where there is one, the tensor.
    """
    path = Path(directory)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory")
    path = path.resolve()
    config, raw_config = read_json_object(path / CONFIG_NAME)
    _check_is_source(config, path / CONFIG_NAME)
    dimensions = Dimensions.from_config(config, str(path / CONFIG_NAME))
    weight_map, raw_index = read_weight_map(path / INDEX_NAME)
    shards: dict[str, SafetensorsFile] = {}
    try:
        for name in sorted(set(weight_map.values())):
            shards[name] = SafetensorsFile(path / name)
        stored = match_index(path, weight_map, shards)
        found, extra = _match_weights(path, dimensions, stored)
    except BaseException:
        for shard in shards.values():
            shard.close()
        raise
    return SourceCheckpoint(
        path,
        config,
        dimensions,
        shards,
        found,
        extra,
        hashlib.sha256(raw_config).hexdigest(),
        hashlib.sha256(raw_index).hexdigest(),
    )


def _check_is_source(config: Mapping[str, Any], path: Path) -> None:
    architectures = config.get("architectures")
    if config.get("model_type") != "deepseek_v4":
        raise CheckpointError(f"{path}: model_type is {config.get('model_type')!r}, expected 'deepseek_v4'")
    if architectures is not None and architectures != ["DeepseekV4ForCausalLM"]:
        raise CheckpointError(f"{path}: architectures is {architectures!r}, expected ['DeepseekV4ForCausalLM']")
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{path}: quantization_config is missing or no object; not an FP8 source checkpoint")
    method = quantization.get("quant_method")
    if method == "compressed-tensors":
        raise CheckpointError(f"{path}: this checkpoint is already converted (quant_method compressed-tensors)")
    if method != "fp8":
        raise CheckpointError(f"{path}: quant_method is {method!r}, expected 'fp8'")
    block = quantization.get("weight_block_size", [128, 128])
    if block != [128, 128]:
        raise CheckpointError(f"{path}: weight_block_size is {block!r}, expected [128, 128]")


def match_index(
    directory: Path, weight_map: Mapping[str, str], shards: Mapping[str, SafetensorsFile]
) -> dict[str, StoredTensor]:
    """Join index and shard headers; they must name exactly the same tensors. Raises CheckpointError."""
    by_shard: dict[str, set[str]] = defaultdict(set)
    for tensor, shard in weight_map.items():
        by_shard[shard].add(tensor)
    stored: dict[str, StoredTensor] = {}
    for shard, file in shards.items():
        missing = by_shard[shard] - file.entries.keys()
        if missing:
            raise CheckpointError(f"{directory / shard}: tensor {min(missing)} is in the index but not in the shard")
        surplus = file.entries.keys() - by_shard[shard]
        if surplus:
            raise CheckpointError(f"{directory / shard}: tensor {min(surplus)} is in the shard but not in the index")
        for name, entry in file.entries.items():
            stored[name] = StoredTensor(name, shard, entry)
    return stored


def check_tensor(directory: Path, stored: StoredTensor, expected: ExpectedTensor) -> None:
    """Raise CheckpointError when a stored tensor's dtype or shape is not the expected one."""
    entry = stored.entry
    where = f"{directory / stored.shard}: tensor {stored.name}"
    if entry.dtype not in expected.dtypes:
        raise CheckpointError(f"{where}: dtype {entry.dtype}, expected {' or '.join(expected.dtypes)}")
    if entry.shape != expected.shape:
        raise CheckpointError(
            f"{where}: shape {list(entry.shape)}, expected {list(expected.shape)} according to config.json"
        )


def _match_weights(
    directory: Path, dimensions: Dimensions, stored: Mapping[str, StoredTensor]
) -> tuple[list[SourceWeight], list[StoredTensor]]:
    found: list[SourceWeight] = []
    known: set[str] = set()
    for spec in weights(dimensions):
        expected = source_tensors(spec, expert_dtype=dimensions.expert_dtype)
        known.update(expected)
        for name, form in expected.items():
            if name not in stored:
                raise CheckpointError(f"{directory / INDEX_NAME}: tensor {name} is missing (config.json asks for it)")
            check_tensor(directory, stored[name], form)
        scale = stored[spec.scale_name] if spec.storage.quantized else None
        found.append(SourceWeight(spec, stored[spec.name], scale))
    extra = stored.keys() - known
    unknown = sorted(extra - redundant_tensors(dimensions))
    if unknown:
        raise CheckpointError(
            f"{directory / stored[unknown[0]].shard}: tensor {unknown[0]} does not belong to this model according to "
            f"config.json{_hint(unknown, dimensions)}"
            + (f" ({len(unknown) - 1} more such tensors)" if len(unknown) > 1 else "")
        )
    return found, [stored[name] for name in sorted(extra)]


def _hint(unknown: Iterable[str], dimensions: Dimensions) -> str:
    if any(name.startswith("mtp.") for name in unknown):
        return f" with {num_mtp_blocks(dimensions)} MTP blocks"
    return ""
