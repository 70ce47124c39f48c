"""Slabs: the part of a stacked sidecar tensor that belongs to one rank and one layer."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import xxhash
from dsv4.checkpoint.safetensors_file import DTYPE_BYTES, TensorEntry
from dsv4.checkpoint.sidecar import SidecarRule, layer_shape
from dsv4.errors import CheckpointError
from numpy.typing import NDArray

from dsv4_converter.dimensions import Dimensions
from dsv4_converter.served import ServedCheckpoint

_NUMPY_DTYPES: Mapping[str, type[np.generic]] = {
    "I8": np.int8,
    "BF16": np.uint16,
    "F16": np.float16,
    "F32": np.float32,
    "I32": np.int32,
    "I64": np.int64,
}


def slab_bytes(dimensions: Dimensions, rule: SidecarRule, ranks: int) -> int:
    """Size of one slab."""
    return math.prod(layer_shape(dimensions, rule, ranks)) * DTYPE_BYTES[rule.dtype]


def slab_offset(entry: TensorEntry, num_bytes: int, num_layers: int, rank: int, position: int) -> int:
    """Where the slab of a rank and of the position-th layer of the group begins in the file."""
    return entry.begin + (rank * num_layers + position) * num_bytes


def expert_names(dimensions: Dimensions, rule: SidecarRule, layer: int, rank: int, ranks: int) -> list[str]:
    """Source tensors of one slab of a rule that splits the experts, in order."""
    count = dimensions.n_routed_experts // ranks
    return [f"layers.{layer}.{rule.source.format(expert=expert)}" for expert in range(rank * count, (rank + 1) * count)]


def load_slab(served: ServedCheckpoint, rule: SidecarRule, layer: int) -> NDArray[np.uint8]:
    """Bytes of a slab that all ranks have in common: the source tensor, transposed or cast where the rule says so."""
    dimensions = served.dimensions
    if not rule.source:
        return _bytes(_hadamard(dimensions.index_head_dim))
    name = f"layers.{layer}.{rule.source}"
    stored = served.tensors.get(name)
    if stored is None:
        # Hash layers have no bias, the others no table: filled with zeros.
        return np.zeros(slab_bytes(dimensions, rule, 1), np.uint8)
    values = np.frombuffer(served.read(name), _NUMPY_DTYPES[stored.entry.dtype]).reshape(stored.entry.shape)
    if rule.transpose:
        values = values.T
    return _bytes(_cast(values, stored.entry.dtype, rule.dtype, name))


def _bytes(values: NDArray[np.generic]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _cast(values: NDArray[np.generic], source: str, target: str, name: str) -> NDArray[np.generic]:
    if source == target:
        return values
    if source == "BF16" and target == "F32":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if source == "F16" and target == "F32":
        return values.astype(np.float32)
    if source == "I64" and target == "I32":
        narrow = values.astype(np.int32)
        if not np.array_equal(narrow, values):
            raise CheckpointError(f"tensor {name}: values do not fit {target}")
        return narrow
    if source in ("F32", "F16") and target == "BF16":
        bits = np.ascontiguousarray(values.astype(np.float32)).view(np.uint32)
        rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        return (rounded >> np.uint32(16)).astype(np.uint16)
    raise CheckpointError(f"tensor {name}: the sidecar stores {target}, the checkpoint {source}")


def _hadamard(size: int) -> NDArray[np.uint16]:
    """[size, size] BF16 bits of the Sylvester-Hadamard matrix times size^-1/2, made by doubling [[H, H], [H, -H]]."""
    if size & (size - 1):
        raise CheckpointError(f"index_head_dim is {size}, no power of two: its Hadamard matrix does not exist")
    signs = np.ones((1, 1), np.int8)
    while len(signs) < size:
        signs = np.block([[signs, signs], [signs, -signs]])
    scale = _cast(np.array([size**-0.5], np.float32), "F32", "BF16", "hadamard").astype(np.uint16)[0]
    return np.where(signs > 0, scale, scale | np.uint16(0x8000)).astype(np.uint16)


def combined_digest(slab_digests: Mapping[str, str]) -> str:
    """Digest of a stacked tensor: XXH3-128 over its slabs' XXH3-128 digests, by rank, then by layer.

    The keys are ``rank.position``.
    """
    order = sorted(slab_digests, key=lambda key: tuple(int(part) for part in key.split(".")))
    total = xxhash.xxh3_128()
    for key in order:
        total.update(bytes.fromhex(slab_digests[key]))
    return total.hexdigest()
