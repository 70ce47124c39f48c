"""Writing one shard: tensor chunks at known offsets, large ones past the page cache where the file system allows it."""

from __future__ import annotations

import errno
import mmap
import os
import queue
import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsv4_converter.output_files import create_temporary, open_temporary, publish, temporary_path

BLOCK = 4096

_Piece = tuple[mmap.mmap | bytes, int, int, int]
"""Memory, the file offset it belongs to, and the file range [begin, end) to write from it."""


class ShardWriter:
    """A shard under its temporary name. Chunks that follow each other are gathered and written in the background.

    Buffered writing costs a copy and fills the page cache with what nobody reads soon, so whole 4 KiB blocks go by
    direct I/O and only the ragged ends of a run are written the usual way (a page is never written both ways).

    Not safe for use by several threads.
    """

    def __init__(
        self, path: Path, size: int, *, buffer_bytes: int, num_buffers: int = 3, keep_existing: bool = False
    ) -> None:
        self._path = path
        self._size = buffer_bytes + 2 * BLOCK
        self._descriptor = open_temporary(path) if keep_existing else create_temporary(path)
        self._direct = _open_direct(temporary_path(path))
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        for _ in range(num_buffers):
            self._free.put(mmap.mmap(-1, self._size))
        self._work: queue.SimpleQueue[tuple[mmap.mmap | bytes, int, int, int] | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._error: BaseException | None = None
        self._buffer: mmap.mmap | None = None
        self._base = self._begin = self._end = 0
        try:
            os.ftruncate(self._descriptor, size)
        except BaseException:
            self._close()
            raise
        self._thread = threading.Thread(target=self._run, name="shard-writer", daemon=True)
        self._thread.start()

    def reserve(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Memory for the bytes at ``offset``; it must be filled before the next call on this object."""
        if self._buffer is None or offset != self._end or self._end + num_bytes > self._base + self._size:
            self._rotate(offset)
        assert self._buffer is not None
        begin = offset - self._base
        self._end = offset + num_bytes
        return np.frombuffer(self._buffer, np.uint8, num_bytes, begin)

    def write(self, offset: int, content: bytes) -> None:
        """Write a small piece."""
        self._raise_error()
        self._work.put((content, offset, offset, offset + len(content)))

    def sync(self) -> None:
        """Wait until everything given so far is durable under the temporary name."""
        self._flush()
        reached = threading.Event()
        self._work.put(reached)
        reached.wait()
        self._raise_error()
        os.fsync(self._descriptor)

    def set_mode(self, mode: int) -> None:
        """Change the permissions of the file."""
        os.fchmod(self._descriptor, mode)

    def finish(self) -> None:
        """Write everything, make it durable and give the shard its name."""
        self._flush()
        self._work.put(None)
        self._thread.join()
        try:
            self._raise_error()
            publish(self._path, self._descriptor)
        finally:
            self._close()

    def abandon(self, *, keep: bool = False) -> None:
        """Stop; remove the temporary file unless it is to be continued."""
        self._error = self._error or InterruptedError()
        self._work.put(None)
        self._thread.join()
        self._close()
        if not keep:
            temporary_path(self._path).unlink(missing_ok=True)

    def _rotate(self, offset: int) -> None:
        """Start a new buffer at ``offset``. A run that goes on takes its last partial block along."""
        carried = b""
        base = offset - offset % BLOCK
        if self._buffer is not None and offset == self._end and base > self._begin:
            carried = self._buffer[base - self._base : offset - self._base]
            self._end = base
        self._flush()
        self._raise_error()
        self._buffer = self._free.get()
        self._buffer[: len(carried)] = carried
        self._base, self._begin, self._end = base, offset - len(carried), offset

    def _flush(self) -> None:
        if self._buffer is not None:
            self._work.put((self._buffer, self._base, self._begin, self._end))
            self._buffer = None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            source, base, begin, end = item
            try:
                if self._error is None:
                    self._write_run(memoryview(source), base, begin, end, aligned=isinstance(source, mmap.mmap))
            except OSError as error:
                self._error = error
            finally:
                if isinstance(source, mmap.mmap):
                    self._free.put(source)

    def _write_run(self, view: memoryview, base: int, begin: int, end: int, *, aligned: bool) -> None:
        first, last = -(-begin // BLOCK) * BLOCK, end // BLOCK * BLOCK
        if aligned and self._direct >= 0 and last > first:
            _write_all(self._descriptor, view[begin - base : first - base], begin)
            try:
                _write_all(self._direct, view[first - base : last - base], first)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Accepted at opening but refused for writing, as some file systems do.
                os.close(self._direct)
                self._direct = -1
                last = first
            begin = last
        _write_all(self._descriptor, view[begin - base : end - base], begin)

    def _close(self) -> None:
        for descriptor in (self._descriptor, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._direct = -1


def _open_direct(path: Path) -> int:
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return -1
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | flag)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return -1
        raise


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
