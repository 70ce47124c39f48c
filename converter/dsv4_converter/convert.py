"""Source checkpoint -> W8A8 checkpoint: the whole run, from checks to the finished marker."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from dsv4.checkpoint.safetensors_file import SafetensorsFile
from dsv4.errors import CheckpointError, ConfigurationError

from dsv4_converter.kernels import COMPILE_THRESHOLD_BYTES, choose_kernels
from dsv4_converter.marker import MARKER_NAME, Marker, ShardRecord, combined_sha256, portable_path
from dsv4_converter.output_files import (
    LOCK_NAME,
    check_free_space,
    copy_file,
    exclusive_lock,
    sync_directory,
    temporary_path,
    write_file,
)
from dsv4_converter.plan import ShardPlan, plan_shards
from dsv4_converter.progress import ProgressCallback, ProgressTracker
from dsv4_converter.served_config import served_config
from dsv4_converter.shard import (
    CHUNK_BYTES,
    ConversionCancelledError,
    ConversionJob,
    convert_shard,
    digest_output,
    memory_for_chunk,
)
from dsv4_converter.source import CONFIG_NAME, INDEX_NAME, SourceCheckpoint, open_source

Rounding = Literal["exact", "rtn"]
COPIED_SUFFIXES = (".json", ".py", ".jinja", ".model")
MAX_AUTOMATIC_JOBS = 8
DEFAULT_MEMORY_BYTES = 2 << 30
_BASE_MEMORY_BYTES = 300 << 20


@dataclass(frozen=True)
class ConversionSummary:
    """What a run did.

    Attributes:
        output: the output directory.
        source_bytes, output_bytes: sizes of all shards.
        shards: name -> size of the output shard.
        converted, reused: names of the shards this run wrote and of those it found finished.
        lossless: ``layer kind`` -> (rows, rows that lost nothing).
        not_copied: names in the source directory that have no copy in the output.
        dry_run: whether nothing was written.
    """

    output: Path
    source_bytes: int
    output_bytes: int
    shards: dict[str, int]
    converted: list[str]
    reused: list[str]
    lossless: dict[str, tuple[int, int]] = field(default_factory=dict)
    not_copied: list[str] = field(default_factory=list)
    dry_run: bool = False


def convert(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    rounding: Rounding = "exact",
    resume: bool = False,
    jobs: int | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    verify: bool = False,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
    cancelled: threading.Event | None = None,
) -> ConversionSummary:
    """Convert a DeepSeek V4 source checkpoint to W8A8.

    Args:
        input_dir: source checkpoint; not changed.
        output_dir: created. Existing directories need ``resume``.
        rounding: ``exact`` stores every row without loss that a power-of-two scale can hold, and takes the better of
            that and round-to-nearest for the others; ``rtn`` always rounds to nearest.
        resume: continue in an existing output directory.
        jobs: shards converted at the same time; None chooses by processors, memory and shards.
        memory_bytes: bound for buffers and the program itself.
        verify: read every output shard again at the end and compare checksums.
        dry_run: check the source and return what would be done.
        progress: called with `ProgressEvent`s, never by two threads at once.
        cancelled: set from any thread to stop; finished shards stay and can be resumed.

    Raises:
        CheckpointError, ConfigurationError: nothing usable was written under a final name except finished shards.
        ConversionCancelledError: ``cancelled`` was set.
    """
    if rounding not in ("exact", "rtn"):
        raise ConfigurationError(f"rounding is {rounding!r}, expected 'exact' or 'rtn'")
    if jobs is not None and jobs < 1:
        raise ConfigurationError(f"jobs is {jobs}, expected at least 1")
    output = Path(output_dir)
    _check_directories(Path(input_dir), output)
    with storage_errors(output), open_source(input_dir) as source:
        run = _Conversion(
            source,
            Path(os.path.abspath(output)),
            rounding,
            plan_shards(source),
            verify,
            progress,
            cancelled or threading.Event(),
        )
        if dry_run:
            return replace(run.summary([], []), dry_run=True)
        return run.execute(resume, jobs, memory_bytes)


@contextlib.contextmanager
def storage_errors(output: Path) -> Iterator[None]:
    """Turn errors of the file system into errors that name the file and what to do."""
    try:
        yield
    except OSError as error:
        name = error.filename or output
        remedy = "; free some space and continue with --resume" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise CheckpointError(f"{name}: {error.strerror or error}{remedy}") from error


def _check_directories(source: Path, output: Path) -> None:
    resolved_source, resolved_output = source.resolve(), output.resolve()
    if resolved_source == resolved_output:
        raise ConfigurationError(f"{output}: output and input are the same directory")
    if resolved_source in resolved_output.parents:
        raise ConfigurationError(f"{output}: the output directory lies inside the input directory")
    if resolved_output in resolved_source.parents:
        raise ConfigurationError(f"{output}: the input directory lies inside the output directory")
    if output.exists() and not output.is_dir():
        raise ConfigurationError(f"{output}: exists and is not a directory")


@dataclass
class _Conversion:
    """One run of `convert`."""

    source: SourceCheckpoint
    output: Path
    rounding: Rounding
    plans: list[ShardPlan]
    verify: bool
    progress: ProgressCallback | None
    cancelled: threading.Event

    def execute(self, resume: bool, jobs: int | None, memory_bytes: int) -> ConversionSummary:
        created = self._make_directory(resume)
        try:
            with exclusive_lock(self.output):
                return self._execute_locked(jobs, memory_bytes)
        except BaseException:
            if created:
                # A run that failed before it wrote anything leaves no directory behind.
                with contextlib.suppress(OSError):
                    self.output.rmdir()
            raise

    def _make_directory(self, resume: bool) -> bool:
        try:
            self.output.mkdir(parents=True)
        except FileExistsError:
            if not resume:
                raise ConfigurationError(
                    f"{self.output}: exists already; continue a conversion with --resume or choose another directory"
                ) from None
            return False
        return True

    def _execute_locked(self, jobs: int | None, memory_bytes: int) -> ConversionSummary:
        marker, marker_time = self._open_marker()
        self._remove_leftovers()
        tracker = ProgressTracker(self.progress, sum(plan.source_bytes for plan in self.plans))
        tracker.emit("start", f"converting {self.source.directory} ({self.rounding} rounding)", jobs=jobs)
        finished = self._finished_shards(marker, marker_time, tracker)
        todo = [plan for plan in self.plans if plan.name not in finished]
        check_free_space(self.output, sum(plan.output_bytes for plan in todo))
        if not (marker.complete and not todo):
            marker.complete = False
            marker.shards = {name: marker.shards[name] for name in finished}
            marker.write(self.output)
        self._convert_shards(todo, marker, jobs, memory_bytes, tracker)
        if self.verify and todo:
            self._verify_outputs(todo, marker, tracker)
        self._finish(marker)
        summary = self.summary([plan.name for plan in todo], finished, marker)
        tracker.emit("done", "Conversion complete", output_bytes=summary.output_bytes)
        return summary

    def _open_marker(self) -> tuple[Marker, int | None]:
        """The marker of an earlier run and its time, or a new one for a directory that holds nothing yet."""
        fresh = Marker(
            portable_path(self.source.directory), self.source.config_sha256, self.source.index_sha256, self.rounding
        )
        path = self.output / MARKER_NAME
        if not path.exists():
            own = {LOCK_NAME, temporary_path(path).name}
            foreign = sorted(name for name in os.listdir(self.output) if name not in own)
            if foreign:
                raise CheckpointError(
                    f"{path}: missing, and {self.output} holds other files ({foreign[0]}); not a conversion to resume"
                )
            return fresh, None
        marker = Marker.read(self.output)
        for what, theirs, ours in (
            ("config.json of the source", marker.source_config_sha256, fresh.source_config_sha256),
            ("index of the source", marker.source_index_sha256, fresh.source_index_sha256),
            ("rounding", marker.rounding, fresh.rounding),
        ):
            if theirs != ours:
                raise CheckpointError(
                    f"{path}: the {what} differs from the conversion to resume ({theirs[:16]} there, {ours[:16]} now)"
                )
        marker.input_dir = fresh.input_dir
        return marker, os.stat(path).st_mtime_ns

    def _remove_leftovers(self) -> None:
        """Remove temporary files of a killed run."""
        for name in os.listdir(self.output):
            if name.startswith(".") and name.endswith(".tmp"):
                (self.output / name).unlink()

    def _finished_shards(self, marker: Marker, marker_time: int | None, tracker: ProgressTracker) -> list[str]:
        """Shards of an earlier run that are whole and come from this source. Raises when the source changed."""
        finished = []
        for plan in self.plans:
            record = marker.shards.get(plan.name)
            if record is None:
                continue
            self._check_source_unchanged(plan, record, marker, marker_time)
            if self._is_whole(plan, record, marker, marker_time):
                tracker.advance(plan.source_bytes)
                finished.append(plan.name)
            else:
                tracker.emit("note", f"{plan.name}: damaged since it was written, converting it again")
        return finished

    def _check_source_unchanged(
        self, plan: ShardPlan, record: ShardRecord, marker: Marker, marker_time: int | None
    ) -> None:
        shard = self.source.shards[plan.name]
        if record.source_identity == shard.identity:
            return
        if marker.complete and marker_time is not None and shard.identity.ctime_ns < marker_time:
            return
        digest = hashlib.sha256()
        for offset in range(0, shard.size, CHUNK_BYTES):
            self._raise_if_cancelled()
            digest.update(shard.pread(offset, min(CHUNK_BYTES, shard.size - offset)))
        if digest.hexdigest() != record.source_sha256:
            raise CheckpointError(f"{shard.path}: changed since it was converted; convert into another directory")

    def _is_whole(self, plan: ShardPlan, record: ShardRecord, marker: Marker, marker_time: int | None) -> bool:
        path = self.output / plan.name
        try:
            with SafetensorsFile(path) as file:
                if file.size != plan.output_bytes or file.entries != plan.outputs:
                    return False
                # Untouched since the marker said so: the checksum is read again only on demand.
                if (
                    marker.complete
                    and not self.verify
                    and marker_time is not None
                    and file.identity.ctime_ns < marker_time
                ):
                    return True
                return digest_output(file, file.entries, lambda _: None, self.cancelled) == record.output_xxh3
        except CheckpointError:
            return False

    def _convert_shards(
        self, todo: list[ShardPlan], marker: Marker, jobs: int | None, memory_bytes: int, tracker: ProgressTracker
    ) -> None:
        if not todo:
            return
        source_bytes = sum(plan.source_bytes for plan in todo)
        lanes = jobs if jobs is not None else automatic_jobs(source_bytes, len(todo), memory_bytes)
        stop = threading.Event()
        job = ConversionJob(
            self.source,
            self.output,
            self.rounding == "exact",
            choose_kernels(source_bytes),
            stop,
            tracker.advance,
            _chunk_bytes(memory_bytes, lanes),
        )
        with ThreadPoolExecutor(lanes, thread_name_prefix="convert") as pool:
            futures = {pool.submit(convert_shard, job, plan): plan for plan in todo}
            try:
                self._collect(futures, marker, tracker)
            except BaseException:
                stop.set()
                for future in futures:
                    future.cancel()
                raise

    def _collect(self, futures: dict[Future[ShardRecord], ShardPlan], marker: Marker, tracker: ProgressTracker) -> None:
        pending = set(futures)
        while pending:
            # Wakes up in between to notice cancellation.
            done, pending = wait(pending, timeout=0.1, return_when=FIRST_COMPLETED)
            self._raise_if_cancelled()
            for future in done:
                plan = futures[future]
                marker.shards[plan.name] = future.result()
                self._check_unchanged()
                marker.write(self.output)
                tracker.emit("file", plan.name, output_bytes=plan.output_bytes)

    def _check_unchanged(self) -> None:
        changed = self.source.changed_shards()
        if changed:
            raise CheckpointError(f"{self.source.directory / changed[0]}: changed while the checkpoint was converted")

    def _raise_if_cancelled(self) -> None:
        if self.cancelled.is_set():
            raise ConversionCancelledError("conversion cancelled")

    def _verify_outputs(self, plans: list[ShardPlan], marker: Marker, tracker: ProgressTracker) -> None:
        for plan in plans:
            with SafetensorsFile(self.output / plan.name) as file:
                found = digest_output(file, file.entries, lambda _: None, self.cancelled)
            if found != marker.shards[plan.name].output_xxh3:
                raise CheckpointError(f"{self.output / plan.name}: reads back differently from what was written")
            tracker.emit("note", f"{plan.name}: verified")

    def _finish(self, marker: Marker) -> None:
        """Write everything beside the shards, the marker last."""
        for path in self._copied_files():
            if not (self.output / path.name).exists():
                copy_file(path, self.output / path.name)
        weight_map = {name: plan.name for plan in self.plans for name in plan.outputs}
        index = {
            "metadata": {"total_size": sum(plan.payload_bytes for plan in self.plans)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        config = served_config(self.source.config, self.source.dimensions, self.source.directory)
        for name, content in ((INDEX_NAME, index), (CONFIG_NAME, config)):
            self._write_json(self.output / name, content)
        combined = combined_sha256({name: record.source_sha256 for name, record in marker.shards.items()})
        if not marker.complete:
            marker.complete = True
            marker.source_shards_sha256 = combined
            marker.write(self.output)
        sync_directory(self.output)

    @staticmethod
    def _write_json(path: Path, content: object) -> None:
        encoded = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
        if not path.exists() or path.read_bytes() != encoded:
            write_file(path, encoded)

    def _copied_files(self) -> list[Path]:
        return sorted(
            path
            for path in self.source.directory.iterdir()
            if path.suffix in COPIED_SUFFIXES
            and path.name not in (CONFIG_NAME, INDEX_NAME, MARKER_NAME)
            and path.is_file()
        )

    def summary(self, converted: list[str], reused: list[str], marker: Marker | None = None) -> ConversionSummary:
        lossless: dict[str, tuple[int, int]] = {}
        for record in marker.shards.values() if marker is not None else ():
            for kind, (rows, exact) in record.lossless.items():
                known = lossless.get(kind, (0, 0))
                lossless[kind] = (known[0] + rows, known[1] + exact)
        present = {path.name for path in self._copied_files()} | {CONFIG_NAME, INDEX_NAME, *self.source.shards}
        return ConversionSummary(
            self.output,
            self.source.total_bytes,
            sum(plan.output_bytes for plan in self.plans),
            {plan.name: plan.output_bytes for plan in self.plans},
            converted,
            reused,
            lossless,
            sorted(path.name for path in self.source.directory.iterdir() if path.name not in present),
        )


def automatic_jobs(source_bytes: int, num_shards: int, memory_bytes: int) -> int:
    """Shards to convert at the same time. One thread of a shard reads and hashes, one converts, one writes."""
    if source_bytes < COMPILE_THRESHOLD_BYTES:
        return 1
    by_memory = (memory_bytes - _BASE_MEMORY_BYTES) // memory_for_chunk(CHUNK_BYTES)
    return max(1, min(os.cpu_count() or 1, MAX_AUTOMATIC_JOBS, num_shards, by_memory))


def _chunk_bytes(memory_bytes: int, lanes: int) -> int:
    """Chunk size that keeps all lanes within the memory bound."""
    available = max(0, memory_bytes - _BASE_MEMORY_BYTES) // lanes
    return max(64 << 10, min(CHUNK_BYTES, CHUNK_BYTES * available // memory_for_chunk(CHUNK_BYTES)))
