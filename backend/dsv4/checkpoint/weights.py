"""Weights of a checkpoint by official name, in the form the chosen numerics compute with."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from dsv4.checkpoint.dequantize import dequantize_fp8, dequantize_int8, dequantize_mxfp4, quantize_rows_int8
from dsv4.checkpoint.names import CheckpointKind, ExpectedTensor, Storage, WeightSpec, expected_tensors
from dsv4.checkpoint.names import weights as weight_specs
from dsv4.checkpoint.safetensors_file import SafetensorsFile
from dsv4.config import ModelConfig, Numerics
from dsv4.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_FILE_NAME = "model.safetensors"
_KIND_PROBE = "layers.0.attn.wq_b.weight"


class ModelWeights:
    """Every weight of one checkpoint. Tensors are read when asked for; files stay mapped, not copied.

    Attributes:
        config: the configuration whose shapes were checked.
        numerics: the form that `matrix` and `quantized` return.
        kind: "source" or "w8a8", how the files store the weights.
    """

    def __init__(
        self, config: ModelConfig, numerics: Numerics, kind: CheckpointKind, files: dict[str, SafetensorsFile]
    ) -> None:
        self.config = config
        self.numerics = numerics
        self.kind = kind
        self._files = files
        self._specs: dict[str, WeightSpec] = {spec.name: spec for spec in weight_specs(config)}

    def stored(self, name: str) -> torch.Tensor:
        """The tensor as the file has it: a read-only view of the mapped file."""
        return self._files[name].tensor(name)

    def vector(self, name: str) -> torch.Tensor:
        """A norm weight, bias, scale or other unquantised tensor as FP32."""
        return self.stored(name).float().clone()

    def matrix(self, name: str) -> torch.Tensor:
        """A weight [out, in] as FP32; in W8A8 what the kernels keep in BF16 is rounded to it.

        INT8 weights are dequantised in both numerics.
        """
        spec = self._specs[name]
        value = self._dequantized(spec)
        if self.numerics == "w8a8" and spec.storage is Storage.FP8_TO_BF16:
            return value.bfloat16().float()
        return value

    def quantized(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """INT8 values [out, in] and FP32 row scales [out] of a weight that the W8A8 kernels multiply in INT8.

        A source checkpoint is quantised here by the rule of the conversion.
        """
        spec = self._specs[name]
        if not spec.storage.int8:
            raise ValueError(f"{name} is not multiplied in INT8")
        if self.kind == "w8a8":
            return self.stored(name), self.stored(spec.scale_name)
        return quantize_rows_int8(self._dequantized(spec))

    def _dequantized(self, spec: WeightSpec) -> torch.Tensor:
        weight = self.stored(spec.name)
        if weight.dtype == torch.float8_e4m3fn:
            return dequantize_fp8(weight, self.stored(spec.scale_name))
        if weight.dtype == torch.int8:
            scale = self.stored(spec.scale_name)
            return dequantize_int8(weight, scale) if self.kind == "w8a8" else dequantize_mxfp4(weight, scale)
        return weight.float().clone()


def load_weights(directory: str | Path, config: ModelConfig, *, numerics: Numerics) -> ModelWeights:
    """Open a checkpoint directory, source or converted, and check every name, shape and dtype.

    Either form serves either numerics: "float" dequantises, and "w8a8" rounds the weights of a source checkpoint by the
    rule of the conversion, in memory.

    Raises:
        CheckpointError: a file or tensor is missing or wrong; the message names both.
    """
    directory = Path(directory)
    files = _open_shards(directory)
    kind = config.checkpoint_format or _detect_kind(directory, files)
    for name, expected in expected_tensors(config, kind).items():
        _check_tensor(directory, files, name, expected)
    return ModelWeights(config, numerics, kind, files)


def _open_shards(directory: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> open shard, from the index or from the only file."""
    index_path = directory / INDEX_NAME
    if not index_path.exists():
        shard = SafetensorsFile(directory / SINGLE_FILE_NAME)
        return dict.fromkeys(shard.entries, shard)
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
    except OSError as error:
        raise CheckpointError(f"{index_path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index_path}: no JSON object with a weight_map") from error
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index_path}: weight_map is no object of file names")
    shards: dict[str, SafetensorsFile] = {}
    for shard_name in sorted(set(weight_map.values())):
        if Path(shard_name).name != shard_name:
            raise CheckpointError(f"{index_path}: {shard_name!r} is not a bare file name")
        shards[shard_name] = SafetensorsFile(directory / shard_name)
    for name, shard_name in weight_map.items():
        if name not in shards[shard_name].entries:
            raise CheckpointError(f"{directory / shard_name}: tensor {name} is missing, but the index places it there")
    return {name: shards[shard_name] for name, shard_name in weight_map.items()}


def _detect_kind(directory: Path, files: dict[str, SafetensorsFile]) -> CheckpointKind:
    if _KIND_PROBE not in files:
        raise CheckpointError(f"{directory}: tensor {_KIND_PROBE} is missing")
    return "w8a8" if files[_KIND_PROBE].entry(_KIND_PROBE).dtype == "I8" else "source"


def _check_tensor(directory: Path, files: dict[str, SafetensorsFile], name: str, expected: ExpectedTensor) -> None:
    if name not in files:
        raise CheckpointError(f"{directory}: tensor {name} is missing")
    entry = files[name].entry(name)
    path = files[name].path
    if entry.shape != expected.shape:
        raise CheckpointError(f"{path}: tensor {name} has shape {list(entry.shape)}, expected {list(expected.shape)}")
    if entry.dtype not in expected.dtypes:
        raise CheckpointError(f"{path}: tensor {name} is {entry.dtype}, expected {' or '.join(expected.dtypes)}")
