"""Checking a W8A8 checkpoint: structure, checksums, values, and the exact error against its source."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import xxhash
from dsv4.checkpoint.names import weights
from dsv4.checkpoint.safetensors_file import SafetensorsFile
from dsv4.checkpoint.sidecar import DIGESTS_KEY, SIDECAR_RULES, group_layers, stacked_shape
from dsv4.errors import CheckpointError, ConfigurationError, Dsv4Error

from dsv4_converter.json_files import parse_json_object
from dsv4_converter.plan import kind_of
from dsv4_converter.progress import ProgressCallback, ProgressTracker
from dsv4_converter.served import ServedCheckpoint, open_served
from dsv4_converter.shard import ConversionCancelledError, digest_output
from dsv4_converter.sidecar_slabs import combined_digest, slab_bytes, slab_offset
from dsv4_converter.source import SourceCheckpoint, open_source
from dsv4_converter.tensor_statistics import KindStatistics, check_bf16, check_int8, check_plain

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. ``where`` is a tensor or file name."""

    where: str
    text: str


@dataclass
class VerificationReport:
    """Outcome of `verify`.

    Attributes:
        directory, source: as given; source is None without one.
        problems: empty for a sound checkpoint.
        notes: what could not be checked, and why.
        tensors: number of stored tensors.
        statistics: ``layer kind`` -> sums over its INT8 weights.
    """

    directory: str
    source: str | None
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tensors: int = 0
    statistics: dict[str, KindStatistics] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        return not self.problems


def verify(
    directory: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    progress: ProgressCallback | None = None,
    cancelled: threading.Event | None = None,
) -> VerificationReport:
    """Check a W8A8 checkpoint and the sidecars beside it.

    Args:
        source: the checkpoint it was converted from; then the exact error of every weight is computed.

    Wrong content is reported, not raised.

    Raises:
        CheckpointError, ConfigurationError: the *source* cannot be opened or is another model.
        ConversionCancelledError: ``cancelled`` was set.
    """
    report = VerificationReport(str(directory), str(source) if source is not None else None)
    with ExitStack() as stack:
        original = stack.enter_context(open_source(source)) if source is not None else None
        try:
            served = stack.enter_context(open_served(directory))
        except Dsv4Error as error:
            report.problems.append(Problem("structure", str(error)))
            return report
        if original is not None and original.dimensions != served.dimensions:
            raise ConfigurationError(f"{source}: config.json describes another model than {directory}")
        _Verification(served, original, report, progress, cancelled or threading.Event()).run()
    return report


class _Verification:
    """One run of `verify`."""

    def __init__(
        self,
        served: ServedCheckpoint,
        source: SourceCheckpoint | None,
        report: VerificationReport,
        progress: ProgressCallback | None,
        cancelled: threading.Event,
    ) -> None:
        self._served = served
        self._source = source
        self._report = report
        self._cancelled = cancelled
        self._sidecars = sorted(served.directory.glob("pypto-deepseek-v4-stacked-r*.safetensors"))
        total = served.total_bytes * (2 if self._has_checksums() else 1)
        self._tracker = ProgressTracker(progress, total + sum(path.stat().st_size for path in self._sidecars))

    def run(self) -> None:
        self._tracker.emit("start", f"verifying {self._served.directory}")
        self._report.tensors = len(self._served.tensors)
        self._check_checksums()
        self._check_tensors()
        for path in self._sidecars:
            self._check_sidecar(path)
        self._tracker.emit("done", "verified", problems=len(self._report.problems))

    def _problem(self, where: str, text: str) -> None:
        self._report.problems.append(Problem(where, text))

    def _has_checksums(self) -> bool:
        return self._served.marker is not None and bool(self._served.marker.shards)

    def _check_checksums(self) -> None:
        marker = self._served.marker
        if marker is None or not marker.shards:
            self._report.notes.append("no checksums: the conversion marker has none, or there is no marker")
            return
        if set(marker.shards) != set(self._served.shards):
            self._problem("marker", "names other shards than the index")
        for name, shard in self._served.shards.items():
            record = marker.shards.get(name)
            if record is None:
                continue
            found = digest_output(shard, shard.entries, self._tracker.advance, self._cancelled)
            if found != record.output_xxh3:
                self._problem(name, "checksum differs from the conversion marker: changed since it was written")

    def _check_tensors(self) -> None:
        originals = {weight.spec.name: weight for weight in self._source.weights} if self._source is not None else {}
        for spec in weights(self._served.dimensions):
            self._raise_if_cancelled()
            original = originals.get(spec.name)
            if spec.storage.int8:
                statistics = self._report.statistics.setdefault(kind_of(spec.name), KindStatistics())
                check_int8(self._served, spec, original, self._source, statistics, self._problem, self._tracker.advance)
            elif spec.storage.quantized:
                check_bf16(self._served, spec, original, self._source, self._problem, self._tracker.advance)
            else:
                shard = original.weight.shard if original is not None else None
                check_plain(self._served, spec.name, self._source, shard, self._problem, self._tracker.advance)

    def _check_sidecar(self, path: Path) -> None:
        try:
            with SafetensorsFile(path) as file:
                self._check_slabs(file)
        except CheckpointError as error:
            self._problem(path.name, str(error))

    def _check_slabs(self, file: SafetensorsFile) -> None:
        """Compare a sidecar's payload with the digests in its header."""
        if DIGESTS_KEY not in file.metadata:
            self._report.notes.append(f"{file.path.name}: has no digests, its payload was not checked")
            return
        digests = parse_json_object(file.metadata[DIGESTS_KEY].encode(), f"{file.path}: {DIGESTS_KEY}")
        dimensions = self._served.dimensions
        for rule in SIDECAR_RULES:
            entry = file.entry(rule.name)
            ranks = entry.shape[0]
            if (
                not ranks
                or dimensions.n_routed_experts % ranks
                or entry.shape != stacked_shape(dimensions, rule, ranks)
            ):
                self._problem(f"{file.path.name}: {rule.name}", f"unexpected shape {list(entry.shape)}")
                continue
            size, layers = slab_bytes(dimensions, rule, ranks), len(group_layers(dimensions, rule.group))
            slabs = {
                f"{rank}.{position}": self._digest(file, slab_offset(entry, size, layers, rank, position), size)
                for rank in range(ranks)
                for position in range(layers)
            }
            if combined_digest(slabs) != digests.get(rule.name):
                self._problem(f"{file.path.name}: {rule.name}", "payload differs from its digest")

    def _digest(self, file: SafetensorsFile, begin: int, num_bytes: int) -> str:
        digest = xxhash.xxh3_128()
        for offset in range(0, num_bytes, _CHUNK_BYTES):
            self._raise_if_cancelled()
            content = file.pread(begin + offset, min(_CHUNK_BYTES, num_bytes - offset))
            digest.update(content)
            self._tracker.advance(len(content))
        return digest.hexdigest()

    def _raise_if_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise ConversionCancelledError("verification cancelled")
