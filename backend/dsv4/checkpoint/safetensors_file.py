"""Strict reader of safetensors files: the header is checked completely before any size or offset of it is used.

The format: 8 bytes little-endian header length, a JSON header ``{name: {dtype, shape, data_offsets}}``, then the
payload, which the tensors cover without holes or overlaps.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dsv4.errors import CheckpointError

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000

# Bits are a multiple of eight for every type a DeepSeek V4 checkpoint uses; packed four-bit weights are stored as I8.
DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies. ``begin`` and ``end`` are byte offsets in the file (not in the payload)."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class FileIdentity:
    """What tells that a file was replaced or written to: device, inode, size, and both change times in ns."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class SafetensorsFile:
    """One open safetensors file. A context manager; the views of `tensor` stay valid after `close`.

    Attributes:
        path: as given.
        entries: name -> TensorEntry, in file order.
        metadata: the ``__metadata__`` strings.
        payload_begin: byte offset of the payload.
        size: file size in bytes when it was opened.
        identity: the file's identity when it was opened.

    Raises:
        CheckpointError: the file is missing, no regular file, or its header is wrong in any way.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._map: mmap.mmap | None = None
        self._descriptor = -1
        self._descriptor = _open_regular(self.path)
        try:
            self.identity = FileIdentity.of(os.fstat(self._descriptor))
            self.size = self.identity.size
            header = self._read_header()
            self.payload_begin = 8 + len(header)
            self.entries, self.metadata = parse_header(header, self.size - self.payload_begin, str(self.path))
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> bytes:
        if self.size < 8:
            raise CheckpointError(f"{self.path}: {self.size} bytes are too short for a safetensors file")
        length = int.from_bytes(self.pread(0, 8), "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{self.path}: header length {length} is above the format's {MAX_HEADER_BYTES} bytes")
        if 8 + length > self.size:
            raise CheckpointError(
                f"{self.path}: header of {length} bytes does not fit the file of {self.size} (truncated?)"
            )
        return self.pread(8, length)

    def fileno(self) -> int:
        """The open descriptor, for `os.preadv` and `os.posix_fadvise`."""
        return self._descriptor

    def pread(self, offset: int, num_bytes: int) -> bytes:
        """Read exactly ``num_bytes`` at ``offset``. Raises CheckpointError when the file got shorter."""
        buffer = bytearray(num_bytes)
        self.pread_into(offset, buffer)
        return bytes(buffer)

    def pread_into(self, offset: int, buffer: bytearray | memoryview) -> None:
        """Fill ``buffer`` from ``offset``. Raises CheckpointError when the file got shorter or cannot be read."""
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot read at byte {offset + done}: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{self.path}: ends at byte {offset + done} while being read (truncated?)")
            done += count

    def entry(self, name: str) -> TensorEntry:
        """Entry of a tensor. Raises CheckpointError when the file does not hold it."""
        try:
            return self.entries[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: tensor {name} is missing") from None

    def read(self, name: str) -> bytes:
        """All bytes of a tensor."""
        entry = self.entry(name)
        return self.pread(entry.begin, entry.num_bytes)

    def tensor(self, name: str) -> torch.Tensor:
        """Zero-copy read-only view of a tensor over a shared mapping of the file. Writing to it crashes the process."""
        import torch

        entry = self.entry(name)
        dtype = torch_dtype(entry.dtype)
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        if self._map is None:
            self._map = mmap.mmap(self._descriptor, self.size, mmap.MAP_SHARED, mmap.PROT_READ)
        with warnings.catch_warnings():
            # torch warns that the buffer is read-only, which is what is wanted here.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(
                self._map, dtype=dtype, count=entry.num_bytes // DTYPE_BYTES[entry.dtype], offset=entry.begin
            )
        return flat.view(entry.shape)

    def unchanged(self) -> bool:
        """Whether the open file and the file now at the path are still the one whose header was read."""
        try:
            current = FileIdentity.of(os.stat(self.path))
        except OSError:
            return False
        return current == self.identity == FileIdentity.of(os.fstat(self._descriptor))

    def close(self) -> None:
        """Close the descriptor. A mapping lives on as long as a tensor views it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._map = None

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name."""
    import torch

    return {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I16": torch.int16,
        "U16": torch.uint16,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I32": torch.int32,
        "U32": torch.uint32,
        "F32": torch.float32,
        "F64": torch.float64,
        "I64": torch.int64,
        "U64": torch.uint64,
    }[name]


def unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """``object_pairs_hook`` of `json.loads` that refuses a name given twice (ValueError)."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the name {key!r} is given twice")
        result[key] = value
    return result


def parse_header(header: bytes, payload_bytes: int, label: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Parse and check a safetensors header (the JSON text without its length field).

    Returns:
        entries in file order with absolute offsets, and the metadata strings.

    Raises:
        CheckpointError: starting with ``label`` and naming the tensor.
    """
    try:
        content = json.loads(header.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label}: safetensors header: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{label}: safetensors header is no JSON object")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{label}: safetensors __metadata__ is no object of strings")
    payload_begin = 8 + len(header)
    entries = [(name, _parse_entry(name, value, payload_begin, label)) for name, value in content.items()]
    entries.sort(key=lambda item: (item[1].begin, item[1].end))
    position = payload_begin
    for name, entry in entries:
        if entry.begin != position:
            problem = "overlaps the tensor before it" if entry.begin < position else "leaves a hole before it"
            raise CheckpointError(f"{label}: tensor {name} {problem} (data_offsets)")
        position = entry.end
    if position != payload_begin + payload_bytes:
        raise CheckpointError(
            f"{label}: the tensors cover {position - payload_begin} payload bytes, the file has {payload_bytes}"
            + (f" (truncated? the last tensor is {entries[-1][0]})" if entries else "")
        )
    return dict(entries), metadata


def _parse_entry(name: str, value: Any, payload_begin: int, label: str) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{label}: tensor {name}: the entry is not {{dtype, shape, data_offsets}}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{label}: tensor {name}: unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(_is_size(extent) for extent in shape):
        raise CheckpointError(f"{label}: tensor {name}: shape {shape!r} is no list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise CheckpointError(f"{label}: tensor {name}: data_offsets {offsets!r} are no two sizes")
    begin, end = offsets
    if end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise CheckpointError(f"{label}: tensor {name}: {dtype} {shape} does not take {end - begin} bytes")
    return TensorEntry(dtype, tuple(shape), payload_begin + begin, payload_begin + end)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def build_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorEntry]]:
    """Header bytes (with the length field) and entries for ``(name, dtype, shape)`` laid out in the given order."""
    sizes = [(name, dtype, tuple(shape), math.prod(shape) * DTYPE_BYTES[dtype]) for name, dtype, shape in tensors]
    content: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape, num_bytes in sizes:
        if name in content:
            raise ValueError(f"tensor {name} is given twice")
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + num_bytes]}
        position += num_bytes
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    payload_begin = 8 + len(text)
    entries = {}
    position = payload_begin
    for name, dtype, shape, num_bytes in sizes:
        entries[name] = TensorEntry(dtype, shape, position, position + num_bytes)
        position += num_bytes
    return len(text).to_bytes(8, "little") + text, entries


def _open_regular(path: Path) -> int:
    """Open for reading. A FIFO or device is refused without blocking on it."""
    try:
        # Looked at first, because opening some devices has effects.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: not a regular file")
    return descriptor
