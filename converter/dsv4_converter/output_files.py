"""Writing files that are either complete under their name or not there: temporary names, fsync, rename, lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dsv4.errors import CheckpointError

LOCK_NAME = ".dsv4-conversion.lock"
SPACE_RESERVE_BYTES = 16 << 20
_COPY_BYTES = 1 << 20


def temporary_path(path: Path) -> Path:
    """The one temporary name of a file, so that a later run finds what a killed one left."""
    return path.with_name(f".{path.name}.tmp")


def create_temporary(path: Path, extra_flags: int = 0) -> int:
    """Create the temporary file of ``path`` for writing, replacing a leftover. The umask decides its mode."""
    temporary = temporary_path(path)
    temporary.unlink(missing_ok=True)
    return os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | extra_flags, 0o666)


def open_temporary(path: Path) -> int:
    """Open the temporary file that an interrupted run left."""
    return os.open(temporary_path(path), os.O_RDWR | os.O_CLOEXEC)


def publish(path: Path, descriptor: int) -> None:
    """Make the temporary file durable and give it its name. The directory entry is made durable by `sync_directory`."""
    os.fsync(descriptor)
    os.replace(temporary_path(path), path)


def sync_directory(directory: Path) -> None:
    """Make renames in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync directories.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Write a small file atomically and durably."""
    descriptor = create_temporary(path)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as stream:
            stream.write(content)
        publish(path, descriptor)
    finally:
        os.close(descriptor)
    sync_directory(path.parent)


def copy_file(source: Path, path: Path) -> None:
    """Copy a file's content atomically; a symbolic link is followed."""
    descriptor = create_temporary(path)
    try:
        with open(source, "rb") as reader, os.fdopen(descriptor, "wb", closefd=False) as writer:
            shutil.copyfileobj(reader, writer, _COPY_BYTES)
        publish(path, descriptor)
    finally:
        os.close(descriptor)


def check_free_space(directory: Path, needed: int) -> None:
    """Raise CheckpointError when the file system of ``directory`` has less than ``needed`` bytes and a reserve free."""
    free = shutil.disk_usage(directory).free
    if free < needed + SPACE_RESERVE_BYTES:
        raise CheckpointError(
            f"{directory}: {needed / 1e9:.2f} GB are needed, the file system has {free / 1e9:.2f} GB free"
        )


@contextlib.contextmanager
def exclusive_lock(directory: Path, name: str = LOCK_NAME) -> Iterator[None]:
    """Hold the lock file of a directory; it ends with the process, however that ends.

    Raises:
        CheckpointError: another process holds it; its id is in the message.
    """
    path = directory / name
    descriptor = _acquire(path)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        # Removed while still held, so that nobody can lock a file that is about to vanish unnoticed.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise CheckpointError(f"{path.parent}: locked by process {holder}, another conversion is running") from None
        except BaseException:
            os.close(descriptor)
            raise
        try:
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
        except FileNotFoundError:
            pass
        # The previous holder removed the file between our open and our lock.
        os.close(descriptor)
