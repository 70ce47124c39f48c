"""Statistics and errors of the tensors of a W8A8 checkpoint, alone and against its source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from dsv4.checkpoint.names import WeightSpec
from numpy.typing import NDArray

from dsv4_converter.numpy_kernels import dequantize_fp8, dequantize_mxfp4
from dsv4_converter.served import ServedCheckpoint
from dsv4_converter.source import SourceCheckpoint, SourceWeight
from dsv4_converter.tables import e8m0_values
from dsv4_converter.values import first_not_finite

_CHUNK_BYTES = 4 << 20

Report = Callable[[str, str], None]
"""Called with a tensor's name and what is wrong with it."""


@dataclass
class KindStatistics:
    """Sums over the weights of one kind in one layer.

    Attributes:
        rows, zero_rows: of INT8 weights.
        least_code, greatest_code: over all INT8 weights.
        scale_exponents: number of rows by ``floor(log2(scale))``.
        squared_error, squared_weight: sums over all weights, against the source.
        lossless_rows: rows equal to the source.
        worst_row_error: largest relative error (RMS) of a row.
    """

    rows: int = 0
    zero_rows: int = 0
    least_code: int = 0
    greatest_code: int = 0
    scale_exponents: Counter[int] = field(default_factory=Counter)
    squared_error: float = 0.0
    squared_weight: float = 0.0
    lossless_rows: int = 0
    worst_row_error: float = 0.0

    @property
    def relative_error(self) -> float:
        """Root mean square error over root mean square weight."""
        return float(np.sqrt(self.squared_error / self.squared_weight)) if self.squared_weight else 0.0


def check_int8(
    served: ServedCheckpoint, spec: WeightSpec, original: SourceWeight | None, source: SourceCheckpoint | None,
    statistics: KindStatistics, report: Report, advance: Callable[[int], None],
) -> None:  # fmt: skip
    """Check an INT8 weight and its scales, and add it to the statistics."""
    stored = served.tensors[spec.name]
    rows, columns = spec.shape
    scales = np.frombuffer(served.read(spec.scale_name), np.float32)
    if not np.isfinite(scales).all() or (scales <= 0).any():
        row = int((~np.isfinite(scales) | (scales <= 0)).argmax())
        report(spec.scale_name, f"row {row}: scale is {scales[row]}")
        return
    shard = served.shards[stored.shard]
    reader = _source_rows(source, original) if source is not None and original is not None else None
    step = max(1, _CHUNK_BYTES // columns)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        raw = shard.pread(stored.entry.begin + first * columns, count * columns)
        codes = np.frombuffer(raw, np.int8).reshape(count, columns)
        least, greatest = int(codes.min()), int(codes.max())
        if least < -127:
            report(spec.name, f"row {first + int((codes == -128).any(axis=1).argmax())}: code -128 is out of range")
        statistics.least_code = min(statistics.least_code, least)
        statistics.greatest_code = max(statistics.greatest_code, greatest)
        statistics.zero_rows += int((~codes.any(axis=1)).sum())
        if reader is not None:
            _add_error(statistics, reader(first, count), codes, scales[first : first + count])
        advance(len(raw))
    statistics.rows += rows
    statistics.scale_exponents.update((np.frexp(scales)[1] - 1).tolist())


def _add_error(
    statistics: KindStatistics, weights: NDArray[np.float32], codes: NDArray[np.int8], scales: NDArray[np.float32]
) -> None:
    exact = weights.astype(np.float64)
    difference = exact - codes * scales.astype(np.float64)[:, None]
    errors = np.einsum("rc,rc->r", difference, difference)
    squares = np.einsum("rc,rc->r", exact, exact)
    statistics.squared_error += float(errors.sum())
    statistics.squared_weight += float(squares.sum())
    statistics.lossless_rows += int((errors == 0).sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(errors == 0, 0.0, np.sqrt(errors / squares))
    statistics.worst_row_error = max(statistics.worst_row_error, float(relative.max()))


def check_bf16(
    served: ServedCheckpoint, spec: WeightSpec, original: SourceWeight | None, source: SourceCheckpoint | None,
    report: Report, advance: Callable[[int], None],
) -> None:  # fmt: skip
    """Check a weight that conversion dequantizes to BF16: finite, and the source's value rounded to nearest even."""
    stored = served.tensors[spec.name]
    rows, columns = spec.shape
    shard = served.shards[stored.shard]
    reader = _source_rows(source, original) if source is not None and original is not None else None
    step = max(1, _CHUNK_BYTES // (2 * columns))
    for first in range(0, rows, step):
        count = min(step, rows - first)
        raw = np.frombuffer(shard.pread(stored.entry.begin + 2 * first * columns, 2 * count * columns), np.uint8)
        index = first_not_finite(raw, "BF16")
        if index >= 0:
            report(spec.name, f"row {first + index // columns}: NaN or infinity")
            return
        if reader is not None:
            bits = reader(first, count).view(np.uint32)
            rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
            wrong = (rounded.astype(np.uint16) != raw.view(np.uint16).reshape(count, columns)).any(axis=1)
            if wrong.any():
                report(spec.name, f"row {first + int(wrong.argmax())}: is not the source's value rounded to BF16")
                return
        advance(len(raw))


def check_plain(
    served: ServedCheckpoint, name: str, source: SourceCheckpoint | None, shard_name: str | None,
    report: Report, advance: Callable[[int], None],
) -> None:  # fmt: skip
    """Check a copied tensor: finite, table entries in range, and equal to the source byte for byte."""
    stored = served.tensors[name]
    shard = served.shards[stored.shard]
    experts = served.dimensions.n_routed_experts
    for offset in range(0, stored.entry.num_bytes, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, stored.entry.num_bytes - offset)
        raw = np.frombuffer(shard.pread(stored.entry.begin + offset, length), np.uint8)
        if first_not_finite(raw, stored.entry.dtype) >= 0:
            report(name, "NaN or infinity")
            return
        if name.endswith(".tid2eid"):
            ids: NDArray[np.signedinteger] = raw.view(np.int64 if stored.entry.dtype == "I64" else np.int32)
            if (ids < 0).any() or (ids >= experts).any():
                report(name, "names an expert that does not exist")
                return
        if source is not None and shard_name is not None:
            original = source.shards[shard_name]
            if original.pread(original.entry(name).begin + offset, length) != raw.tobytes():
                report(name, "differs from the source")
                return
        advance(length)


def _source_rows(source: SourceCheckpoint, weight: SourceWeight) -> Callable[[int, int], NDArray[np.float32]]:
    """A function ``(first row, rows) -> float32 weights`` of a quantized weight of the source."""
    assert weight.scale is not None
    entry = weight.weight.entry
    shard = source.shards[weight.weight.shard]
    raw_scale = np.frombuffer(source.shards[weight.scale.shard].read(weight.scale.name), np.uint8)
    scale_shape = weight.scale.entry.shape
    row_bytes = entry.shape[1]

    def read(first: int, count: int) -> NDArray[np.uint8]:
        content = shard.pread(entry.begin + first * row_bytes, count * row_bytes)
        return np.frombuffer(content, np.uint8).reshape(count, row_bytes)

    if entry.dtype == "I8":
        group_scales = raw_scale.reshape(scale_shape)
        return lambda first, count: dequantize_mxfp4(read(first, count), group_scales[first : first + count])
    block_scales = raw_scale.view(np.float32) if weight.scale.entry.dtype == "F32" else e8m0_values(raw_scale)
    block_scales = block_scales.reshape(scale_shape)
    return lambda first, count: dequantize_fp8(read(first, count), block_scales, first)
