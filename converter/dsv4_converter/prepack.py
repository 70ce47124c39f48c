"""Writing the sidecar (see `dsv4.checkpoint.sidecar`) in one pass and bounded memory."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

import xxhash
from dsv4.checkpoint.safetensors_file import SafetensorsFile, build_header
from dsv4.checkpoint.sidecar import (
    CONTENT_KEY,
    DEFAULT_RANKS,
    DIGESTS_KEY,
    FINGERPRINT_KEY,
    SIDECAR_FORMAT,
    SIDECAR_RULES,
    SidecarRule,
    content_fingerprint,
    group_layers,
    read_into_page_cache,
    sidecar_path,
    source_fingerprint,
    stacked_shape,
)
from dsv4.errors import CheckpointError, ConfigurationError

from dsv4_converter.convert import storage_errors
from dsv4_converter.json_files import read_json_object
from dsv4_converter.output_files import check_free_space, exclusive_lock, sync_directory, temporary_path, write_file
from dsv4_converter.plan import DTYPE_ORDER
from dsv4_converter.progress import ProgressCallback, ProgressTracker
from dsv4_converter.served import ServedCheckpoint, open_served
from dsv4_converter.shard import ConversionCancelledError
from dsv4_converter.shard_writer import ShardWriter
from dsv4_converter.sidecar_slabs import combined_digest, expert_names, load_slab, slab_bytes, slab_offset

_CHUNK_BYTES = 8 << 20
_CHECKPOINT_BYTES = 2 << 30
"""Bytes written between two records of how far the file is durable."""

_EMPTY_DIGEST = "0" * 32


@dataclass(frozen=True)
class PrepackSummary:
    """What `prepack` did: the file, its size, and how many bytes an earlier run had written already."""

    path: Path
    num_bytes: int
    resumed_bytes: int
    warmed: bool


def prepack(
    directory: str | os.PathLike[str],
    *,
    ranks: int = DEFAULT_RANKS,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    warm: bool = False,
    progress: ProgressCallback | None = None,
    cancelled: threading.Event | None = None,
) -> PrepackSummary:
    """Write the sidecar of a W8A8 checkpoint. An interrupted run is continued where it stopped.

    Args:
        directory: the checkpoint.
        ranks: number of ranks; must divide the routed experts.
        output: another path than `dsv4.checkpoint.sidecar.sidecar_path`.
        force: replace an existing sidecar.
        warm: read the sidecar into the page cache; an existing one is kept and only read, unless ``force``.

    Raises:
        CheckpointError, ConfigurationError: nothing was written under the final name.
        ConversionCancelledError: ``cancelled`` was set; the next run continues.
    """
    if ranks < 1:
        raise ConfigurationError(f"ranks is {ranks}, expected at least 1")
    cancelled = cancelled or threading.Event()
    with contextlib.ExitStack() as stack:
        path = Path(output) if output is not None else sidecar_path(Path(directory), ranks)
        stack.enter_context(storage_errors(path))
        served = stack.enter_context(open_served(directory))
        if served.dimensions.n_routed_experts % ranks:
            raise ConfigurationError(
                f"ranks is {ranks}, which does not divide the {served.dimensions.n_routed_experts} routed experts"
            )
        if path.exists() and not path.is_file():
            raise ConfigurationError(f"{path}: exists and is not a file")
        resumed = 0
        exists = path.exists()
        if exists and not force and not warm:
            raise ConfigurationError(f"{path}: exists already; replace it with --force")
        if force or not exists:
            stack.enter_context(exclusive_lock(path.parent, f".{path.name}.lock"))
            resumed = _Packing(served, ranks, path, progress, cancelled).execute()
        if warm:
            _warm(path, progress)
        return PrepackSummary(path, path.stat().st_size, resumed, warm)


def _warm(path: Path, progress: ProgressCallback | None) -> None:
    with SafetensorsFile(path) as file:
        tracker = ProgressTracker(progress, file.size)
        tracker.emit("start", f"reading {path} into memory")
        read_into_page_cache(file, tracker.advance)
        tracker.emit("done", "")


@dataclass(frozen=True)
class _Step:
    """All of one rule's data of one layer, for every rank."""

    rule: SidecarRule
    position: int
    layer: int


class _Packing:
    """One run of `prepack`."""

    def __init__(
        self,
        served: ServedCheckpoint,
        ranks: int,
        path: Path,
        progress: ProgressCallback | None,
        cancelled: threading.Event,
    ) -> None:
        self._served = served
        self._ranks = ranks
        self._path = path
        self._progress_path = path.with_name(f".{path.name}.progress")
        self._cancelled = cancelled
        config = served.dimensions
        rules = sorted(SIDECAR_RULES, key=lambda rule: (DTYPE_ORDER.index(rule.dtype), rule.name))
        self._steps = [
            _Step(rule, position, layer)
            for rule in rules
            for position, layer in enumerate(group_layers(config, rule.group))
        ]
        self._metadata = {
            "format": SIDECAR_FORMAT,
            FINGERPRINT_KEY: source_fingerprint(served.directory, config, served.weight_map, ranks),
            CONTENT_KEY: content_fingerprint(served.directory, config, served.weight_map, ranks),
            # Replaced by the real digests at the end: all have the same length.
            DIGESTS_KEY: json.dumps({rule.name: _EMPTY_DIGEST for rule in rules}),
        }
        self._shapes = [(rule.name, rule.dtype, stacked_shape(config, rule, ranks)) for rule in rules]
        self._header, self._entries = build_header(self._shapes, self._metadata)
        self._size = max(entry.end for entry in self._entries.values())
        self._digests: dict[str, dict[str, str]] = {rule.name: {} for rule in rules}
        self._tracker = ProgressTracker(progress, self._size - len(self._header))

    def execute(self) -> int:
        """Write the file; returns the bytes that an earlier run had written."""
        done = self._steps_done_before()
        resumed = sum(self._step_bytes(step) for step in self._steps[:done])
        self._tracker.emit("start", f"packing {self._served.directory} for {self._ranks} ranks into {self._path}")
        if done:
            self._tracker.emit("note", f"continuing after {resumed / 1e9:.2f} GB")
            self._tracker.advance(resumed)
        else:
            temporary_path(self._path).unlink(missing_ok=True)
            check_free_space(self._path.parent, self._size)
        writer = ShardWriter(self._path, self._size, buffer_bytes=2 * _CHUNK_BYTES, keep_existing=done > 0)
        try:
            self._write(writer, done)
        except BaseException:
            writer.abandon(keep=self._progress_path.exists())
            raise
        self._progress_path.unlink(missing_ok=True)
        sync_directory(self._path.parent)
        self._tracker.emit("done", "Prepacking complete")
        return resumed

    def _write(self, writer: ShardWriter, done: int) -> None:
        since_record = 0
        for index, step in enumerate(self._steps[done:], start=done):
            if self._cancelled.is_set():
                raise ConversionCancelledError("prepacking cancelled")
            self._pack(writer, step)
            since_record += self._step_bytes(step)
            if since_record >= _CHECKPOINT_BYTES:
                writer.sync()
                self._record(index + 1)
                since_record = 0
        for shard in self._served.shards.values():
            if not shard.unchanged():
                raise CheckpointError(f"{shard.path}: changed while it was packed")
        digests = {name: combined_digest(slabs) for name, slabs in self._digests.items()}
        header, _ = build_header(self._shapes, {**self._metadata, DIGESTS_KEY: json.dumps(digests)})
        writer.write(0, header)
        first = next(iter(self._served.shards.values()))
        writer.set_mode(stat.S_IMODE(os.stat(first.path).st_mode) & 0o666)
        writer.finish()

    def _steps_done_before(self) -> int:
        """Steps that are durable in the temporary file of an interrupted run of the same packing."""
        if not self._progress_path.exists() or not temporary_path(self._path).exists():
            self._progress_path.unlink(missing_ok=True)
            return 0
        try:
            content, _ = read_json_object(self._progress_path)
            same = content["metadata"] == self._metadata and os.stat(temporary_path(self._path)).st_size == self._size
            done, digests = int(content["steps"]), content["digests"]
            if same and 0 < done <= len(self._steps) and digests.keys() == self._digests.keys():
                self._digests = {name: dict(slabs) for name, slabs in digests.items()}
                return done
        except (CheckpointError, KeyError, TypeError, ValueError, AttributeError):
            pass
        self._progress_path.unlink(missing_ok=True)
        return 0

    def _record(self, steps: int) -> None:
        content = {"metadata": self._metadata, "steps": steps, "digests": self._digests}
        write_file(self._progress_path, json.dumps(content).encode())

    def _slab(self, step: _Step, rank: int) -> int:
        """Where a rank's slab of the step begins."""
        return slab_offset(
            self._entries[step.rule.name],
            slab_bytes(self._served.dimensions, step.rule, self._ranks),
            len(group_layers(self._served.dimensions, step.rule.group)),
            rank,
            step.position,
        )

    def _step_bytes(self, step: _Step) -> int:
        return self._ranks * slab_bytes(self._served.dimensions, step.rule, self._ranks)

    def _pack(self, writer: ShardWriter, step: _Step) -> None:
        digests = self._digests[step.rule.name]
        if step.rule.per_expert:
            for rank in range(self._ranks):
                digests[f"{rank}.{step.position}"] = self._copy_experts(writer, step, rank)
            return
        content = load_slab(self._served, step.rule, step.layer)
        digest = xxhash.xxh3_128(content.data).hexdigest()
        for rank in range(self._ranks):
            digests[f"{rank}.{step.position}"] = digest
            offset = self._slab(step, rank)
            for begin in range(0, len(content), _CHUNK_BYTES):
                piece = content[begin : begin + _CHUNK_BYTES]
                writer.reserve(offset + begin, len(piece))[:] = piece
                self._tracker.advance(len(piece))

    def _copy_experts(self, writer: ShardWriter, step: _Step, rank: int) -> str:
        """Read a rank's experts straight into the output buffers; returns the slab's digest."""
        digest = xxhash.xxh3_128()
        offset = self._slab(step, rank)
        for name in expert_names(self._served.dimensions, step.rule, step.layer, rank, self._ranks):
            stored = self._served.tensors[name]
            shard = self._served.shards[stored.shard]
            for begin in range(stored.entry.begin, stored.entry.end, _CHUNK_BYTES):
                if self._cancelled.is_set():
                    raise ConversionCancelledError("prepacking cancelled")
                piece = writer.reserve(offset, min(_CHUNK_BYTES, stored.entry.end - begin))
                shard.pread_into(begin, piece.data)
                digest.update(piece.data)
                offset += len(piece)
                self._tracker.advance(len(piece))
        return digest.hexdigest()
