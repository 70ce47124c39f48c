"""Converting one shard in one pass over its bytes, in bounded memory."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from dsv4.checkpoint.safetensors_file import DTYPE_BYTES, SafetensorsFile, TensorEntry
from dsv4.errors import CheckpointError, Dsv4Error
from numpy.typing import NDArray

from dsv4_converter.kernels import RowKernels
from dsv4_converter.marker import ShardRecord
from dsv4_converter.plan import Action, ShardPlan, TensorPlan
from dsv4_converter.shard_writer import ShardWriter
from dsv4_converter.source import SourceCheckpoint, StoredTensor
from dsv4_converter.tables import e8m0_values
from dsv4_converter.values import first_not_finite

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK_BYTES = 2 << 20
"""Source bytes handled at a time: small enough that kernels and checksums find them in the processor's cache."""

_READ_BUFFERS = 4
_LARGEST_EXPANSION = 2


class ConversionCancelledError(Dsv4Error):
    """The caller asked a running conversion to stop. Finished shards stay."""


@dataclass(frozen=True)
class ConversionJob:
    """What all shards of one run share.

    Attributes:
        source: the checked source.
        output: output directory.
        exact: rounding mode, see `dsv4_converter.numpy_kernels.mxfp4_to_int8`.
        kernels: row kernels.
        cancelled: set to stop.
        advance: called with the number of source bytes done, from several threads.
        chunk_bytes: source bytes a chunk.
    """

    source: SourceCheckpoint
    output: Path
    exact: bool
    kernels: RowKernels
    cancelled: threading.Event
    advance: Callable[[int], None]
    chunk_bytes: int = CHUNK_BYTES


def memory_for_chunk(chunk_bytes: int) -> int:
    """Bytes of buffers that one shard in progress takes."""
    return _READ_BUFFERS * chunk_bytes + 3 * 2 * _LARGEST_EXPANSION * chunk_bytes


@dataclass
class ShardDigest:
    """Checksum of an output shard that does not depend on the order in which its tensors are finished.

    It is the XXH3-128 of the header (with the length field) followed by the XXH3-128 digest of every tensor's bytes in
    file order.
    """

    header: bytes
    tensors: dict[str, xxhash.xxh3_128] = field(default_factory=dict)

    def update(self, name: str, content: Buffer) -> None:
        """Add the next bytes of a tensor."""
        digest = self.tensors.get(name)
        if digest is None:
            digest = self.tensors[name] = xxhash.xxh3_128()
        digest.update(content)

    def hexdigest(self, order: Iterator[str] | list[str]) -> str:
        """Digest of the shard whose tensors lie in the given order."""
        total = xxhash.xxh3_128(self.header)
        for name in order:
            digest = self.tensors.get(name)
            total.update(digest.digest() if digest is not None else xxhash.xxh3_128().digest())
        return total.hexdigest()


@dataclass(frozen=True)
class _Chunk:
    """Whole rows of one tensor (or any bytes of a tensor that is only hashed)."""

    name: str
    offset: int
    num_bytes: int
    first_row: int
    num_rows: int
    is_last: bool


def convert_shard(job: ConversionJob, plan: ShardPlan) -> ShardRecord:
    """Convert one shard and publish it under its name.

    Raises:
        CheckpointError: the source is wrong, naming tensor and row, or changed while it was read.
        ConversionCancelledError: `ConversionJob.cancelled` was set.
        OSError: from writing.
    """
    source = job.source.shards[plan.name]
    chunks = list(_chunks(source, job.chunk_bytes))
    largest = max((chunk.num_bytes for chunk in chunks), default=1)
    writer = ShardWriter(
        job.output / plan.name, plan.output_bytes, buffer_bytes=max(2 * _LARGEST_EXPANSION * largest, 1 << 16)
    )
    reader = _Reader(source, chunks, largest)
    try:
        shard = _ShardConversion(job, plan, writer)
        writer.write(0, plan.header)
        for chunk, content in reader:
            if job.cancelled.is_set():
                raise ConversionCancelledError("conversion cancelled")
            shard.process(chunk, content)
            job.advance(chunk.num_bytes)
        if not source.unchanged():
            raise CheckpointError(f"{source.path}: changed while it was being converted")
        writer.finish()
    except BaseException:
        reader.stop()
        writer.abandon()
        raise
    return ShardRecord(
        source_sha256=reader.sha256.hexdigest(),
        output_bytes=plan.output_bytes,
        output_xxh3=shard.digest.hexdigest(list(plan.outputs)),
        lossless={kind: (rows, lossless) for kind, (rows, lossless) in sorted(shard.lossless.items())},
        source_identity=source.identity,
    )


def _chunks(source: SafetensorsFile, chunk_bytes: int) -> Iterator[_Chunk]:
    """The payload in file order, cut at row boundaries."""
    for name, entry in source.entries.items():
        rows = entry.shape[0] if len(entry.shape) == 2 else 1
        if entry.num_bytes == 0 or rows == 0:
            continue
        row_bytes = entry.num_bytes // rows
        if len(entry.shape) != 2:
            rows, row_bytes = entry.num_bytes // 8 + 1, 8
        step = max(1, chunk_bytes // row_bytes)
        for first in range(0, rows, step):
            begin = entry.begin + first * row_bytes
            end = min(begin + step * row_bytes, entry.end)
            if end > begin:
                yield _Chunk(name, begin, end - begin, first, (end - begin) // row_bytes, end == entry.end)


class _Reader:
    """Reads chunks ahead in a thread and hashes the very bytes it hands out."""

    def __init__(self, source: SafetensorsFile, chunks: list[_Chunk], largest: int) -> None:
        self._source = source
        self._chunks = chunks
        self._stopped = False
        self.sha256 = hashlib.sha256()
        self._free: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        for _ in range(_READ_BUFFERS):
            self._free.put(bytearray(largest))
        self._ready: queue.SimpleQueue[tuple[_Chunk, bytearray] | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="shard-reader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[_Chunk, NDArray[np.uint8]]]:
        while (item := self._ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            chunk, buffer = item
            yield chunk, np.frombuffer(buffer, np.uint8, chunk.num_bytes)
            self._free.put(buffer)
        self._thread.join()

    def stop(self) -> None:
        """End the thread; it may be waiting for a buffer."""
        self._stopped = True
        self._free.put(bytearray(1))
        self._thread.join()

    def _run(self) -> None:
        try:
            self.sha256.update(self._source.pread(0, self._source.payload_begin))
            for chunk in self._chunks:
                buffer = self._free.get()
                if self._stopped:
                    return
                view = memoryview(buffer)[: chunk.num_bytes]
                self._source.pread_into(chunk.offset, view)
                self.sha256.update(view)
                self._ready.put((chunk, buffer))
            self._ready.put(None)
        except (CheckpointError, OSError, MemoryError) as error:
            self._ready.put(error)


class _ShardConversion:
    """State of one shard: the tensor being converted and the checksums so far."""

    def __init__(self, job: ConversionJob, plan: ShardPlan, writer: ShardWriter) -> None:
        self._job = job
        self._plan = plan
        self._writer = writer
        self.digest = ShardDigest(plan.header)
        self.lossless: dict[str, tuple[int, int]] = {}
        self._scales: NDArray[np.uint8] | NDArray[np.float32] = np.empty(0, np.uint8)
        self._row_scales: NDArray[np.float32] = np.empty(0, np.float32)

    def process(self, chunk: _Chunk, content: NDArray[np.uint8]) -> None:
        """Convert one chunk; the chunks of a tensor come in order."""
        tensor = self._plan.tensors.get(chunk.name)
        if tensor is None:
            # The scale of a quantized weight: hashed by the reader, read again where the weight is.
            return
        if tensor.action is Action.COPY:
            self._copy(tensor, chunk, content)
            return
        if chunk.first_row == 0:
            self._begin(tensor)
        if tensor.action is Action.FP8_TO_BF16:
            self._to_bf16(tensor, chunk, content)
        else:
            self._to_int8(tensor, chunk, content)

    def _where(self, name: str, row: int) -> str:
        return f"{self._job.source.directory / self._plan.name}: tensor {name}: row {row}"

    def _copy(self, tensor: TensorPlan, chunk: _Chunk, content: NDArray[np.uint8]) -> None:
        self._check_values(tensor, chunk, content)
        out = self._writer.reserve(
            self._plan.outputs[tensor.name].begin + chunk.offset - tensor.entry.begin, chunk.num_bytes
        )
        out[:] = content
        self.digest.update(tensor.name, out.data)

    def _check_values(self, tensor: TensorPlan, chunk: _Chunk, content: NDArray[np.uint8]) -> None:
        """Refuse NaN and infinity, and expert numbers that do not exist."""
        dtype = tensor.entry.dtype
        if tensor.name.endswith(".tid2eid"):
            experts: NDArray[np.signedinteger] = content.view(np.int64 if dtype == "I64" else np.int32)
            wrong = (experts < 0) | (experts >= self._job.source.dimensions.n_routed_experts)
            if wrong.any():
                row = chunk.first_row + int(wrong.argmax()) // tensor.entry.shape[-1]
                raise CheckpointError(f"{self._where(tensor.name, row)}: names an expert that does not exist")
        index = first_not_finite(content, dtype)
        if index >= 0:
            element = (chunk.offset - tensor.entry.begin) // DTYPE_BYTES[dtype] + index
            row = element // tensor.entry.shape[-1] if len(tensor.entry.shape) > 1 else element
            raise CheckpointError(f"{self._where(tensor.name, row)}: NaN or infinity")

    def _begin(self, tensor: TensorPlan) -> None:
        assert tensor.scale is not None
        self._scales = self._read_scale(tensor, tensor.scale)
        self._row_scales = np.empty(tensor.entry.shape[0], np.float32)

    def _read_scale(self, tensor: TensorPlan, scale: StoredTensor) -> NDArray[np.uint8] | NDArray[np.float32]:
        raw = np.frombuffer(self._job.source.shards[scale.shard].read(scale.name), np.uint8)
        shape = scale.entry.shape
        if tensor.action is Action.MXFP4_TO_INT8:
            return raw.reshape(shape)
        values = raw.view(np.float32) if scale.entry.dtype == "F32" else e8m0_values(raw)
        values = values.reshape(shape)
        wrong = ~np.isfinite(values) | (values < 0)
        if wrong.any():
            row, column = (int(i) for i in np.argwhere(wrong)[0])
            raise CheckpointError(
                f"{self._job.source.directory / scale.shard}: tensor {scale.name}: row {row}: scale of block column "
                f"{column} is {values[row, column]} (weight rows {128 * row} to {128 * row + 127})"
            )
        return values

    def _to_bf16(self, tensor: TensorPlan, chunk: _Chunk, content: NDArray[np.uint8]) -> None:
        columns = tensor.entry.shape[1]
        begin = self._plan.outputs[tensor.name].begin + 2 * chunk.first_row * columns
        out = self._writer.reserve(begin, 2 * chunk.num_bytes)
        bad = self._job.kernels.fp8_to_bf16(
            content.reshape(chunk.num_rows, columns),
            self._scales.view(np.float32),
            chunk.first_row,
            out.view(np.uint16).reshape(chunk.num_rows, columns),
        )
        if bad >= 0:
            raise CheckpointError(f"{self._where(tensor.name, chunk.first_row + bad)}: NaN or beyond BF16")
        self.digest.update(tensor.name, out.data)

    def _to_int8(self, tensor: TensorPlan, chunk: _Chunk, content: NDArray[np.uint8]) -> None:
        entry = self._plan.outputs[tensor.name]
        columns = entry.shape[1]
        rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
        out = self._writer.reserve(entry.begin + chunk.first_row * columns, chunk.num_rows * columns)
        codes = out.view(np.int8).reshape(chunk.num_rows, columns)
        weights = content.reshape(chunk.num_rows, -1)
        if tensor.action is Action.MXFP4_TO_INT8:
            bad, lossless = self._job.kernels.mxfp4_to_int8(
                weights, self._scales.view(np.uint8)[rows], codes, self._row_scales[rows], self._job.exact
            )
        else:
            bad, lossless = self._job.kernels.fp8_to_int8(
                weights,
                self._scales.view(np.float32),
                chunk.first_row,
                codes,
                self._row_scales[rows],
                self._job.exact,
            )
        if bad >= 0:
            raise CheckpointError(
                f"{self._where(tensor.name, chunk.first_row + bad)}: NaN, or weight times scale is beyond float32"
            )
        self.digest.update(tensor.name, out.data)
        total_rows, total_lossless = self.lossless.get(tensor.kind, (0, 0))
        self.lossless[tensor.kind] = (total_rows + chunk.num_rows, total_lossless + lossless)
        if chunk.is_last:
            scales = self._row_scales.tobytes()
            self._writer.write(self._plan.outputs[tensor.scale_name].begin, scales)
            self.digest.update(tensor.scale_name, scales)


def digest_output(
    file: SafetensorsFile,
    entries: dict[str, TensorEntry],
    advance: Callable[[int], None],
    cancelled: threading.Event,
) -> str:
    """Checksum of a finished shard as `ShardDigest` defines it, read from the file."""
    digest = ShardDigest(file.pread(0, file.payload_begin))
    buffer = bytearray(CHUNK_BYTES)
    for name, entry in entries.items():
        for offset in range(entry.begin, entry.end, CHUNK_BYTES):
            if cancelled.is_set():
                raise ConversionCancelledError("conversion cancelled")
            view = memoryview(buffer)[: min(CHUNK_BYTES, entry.end - offset)]
            file.pread_into(offset, view)
            digest.update(name, view)
            advance(len(view))
    return digest.hexdigest(list(entries))
