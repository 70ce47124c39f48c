"""The sidecar: hidden-layer weights prepacked into the rank-stacked layout of the NPU runner.

One safetensors file beside the checkpoint, ``pypto-deepseek-v4-stacked-r{ranks}.safetensors``. Each tensor is
``[ranks, layers * d1, d2, ...]``: the layers of its group follow each other along the second axis. Experts are split
over the ranks, every other weight is repeated once a rank. This module knows the layout and decides at start-up whether
a sidecar can be mapped; `dsv4_converter.prepack` writes it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from dsv4.checkpoint.names import ModelDimensions
from dsv4.checkpoint.safetensors_file import DTYPE_BYTES, SafetensorsFile
from dsv4.errors import CheckpointError

if TYPE_CHECKING:
    import torch

SIDECAR_FORMAT = "pypto-deepseek-v4-stacked-v1"
DEFAULT_RANKS = 8
HOT_SHARE = 0.95
"""Share of sampled pages in memory from which on a sidecar counts as hot."""

FINGERPRINT_KEY = "source_fingerprint"
CONTENT_KEY = "content_fingerprint"
DIGESTS_KEY = "slab_xxh3"

_WHOLE_FILE_BYTES = 64 << 20
_SAMPLE_WINDOWS = 64
_SAMPLE_BYTES = 64 << 10
_RESIDENCY_WHOLE_FILE_BYTES = 256 << 20
_RESIDENCY_WINDOW_BYTES = 4 << 20
_READ_BYTES = 8 << 20

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SidecarRule:
    """How one stacked tensor is made.

    Attributes:
        name: tensor name in the sidecar.
        group: ``fwd`` (all hidden layers), ``csa`` (ratio 4) or ``hca`` (ratio 128).
        source: tensor name relative to ``layers.N.``; ``{expert}`` stands for the expert number. Empty: generated.
        dtype: stored dtype.
        transpose: store [in, out] instead of [out, in].
    """

    name: str
    group: str
    source: str
    dtype: str
    transpose: bool = False

    @property
    def per_expert(self) -> bool:
        """Whether the ranks share the experts instead of repeating the tensor."""
        return "{expert}" in self.source


def _rules() -> Iterator[SidecarRule]:
    for part, norm in (("attn", "attn_norm_w"), ("ffn", "norm_w")):
        yield SidecarRule(f"hc_{part}_fn", "fwd", f"hc_{part}_fn", "F32")
        yield SidecarRule(f"hc_{part}_scale", "fwd", f"hc_{part}_scale", "F32")
        yield SidecarRule(f"hc_{part}_base", "fwd", f"hc_{part}_base", "F32")
        yield SidecarRule(norm, "fwd", f"{part}_norm.weight", "BF16")
    yield SidecarRule("wq_a", "fwd", "attn.wq_a.weight", "BF16", transpose=True)
    yield SidecarRule("wq_b", "fwd", "attn.wq_b.weight", "I8", transpose=True)
    yield SidecarRule("wq_b_scale", "fwd", "attn.wq_b.scale", "F32")
    yield SidecarRule("wkv", "fwd", "attn.wkv.weight", "BF16", transpose=True)
    yield SidecarRule("gamma_cq", "fwd", "attn.q_norm.weight", "BF16")
    yield SidecarRule("gamma_ckv", "fwd", "attn.kv_norm.weight", "BF16")
    yield SidecarRule("attn_sink", "fwd", "attn.attn_sink", "F32")
    yield SidecarRule("wo_a", "fwd", "attn.wo_a.weight", "BF16")
    yield SidecarRule("wo_b", "fwd", "attn.wo_b.weight", "I8")
    yield SidecarRule("wo_b_scale", "fwd", "attn.wo_b.scale", "F32")
    yield SidecarRule("gate_w", "fwd", "ffn.gate.weight", "F32")
    yield SidecarRule("gate_bias", "fwd", "ffn.gate.bias", "F32")
    yield SidecarRule("tid2eid", "fwd", "ffn.gate.tid2eid", "I32")
    for name in ("w1", "w3", "w2"):
        yield SidecarRule(f"shared_{name}", "fwd", f"ffn.shared_experts.{name}.weight", "I8")
        yield SidecarRule(f"shared_{name}_scale", "fwd", f"ffn.shared_experts.{name}.scale", "F32")
        yield SidecarRule(f"routed_{name}", "fwd", f"ffn.experts.{{expert}}.{name}.weight", "I8")
        yield SidecarRule(f"routed_{name}_scale", "fwd", f"ffn.experts.{{expert}}.{name}.scale", "F32")
    for group, prefix, source in (
        ("csa", "csa_cmp", "attn.compressor"),
        ("csa", "csa_inner", "attn.indexer.compressor"),
        ("hca", "hca_cmp", "attn.compressor"),
    ):
        yield SidecarRule(f"{prefix}_wkv", group, f"{source}.wkv.weight", "BF16")
        yield SidecarRule(f"{prefix}_wgate", group, f"{source}.wgate.weight", "BF16")
        yield SidecarRule(f"{prefix}_ape", group, f"{source}.ape", "F32")
        yield SidecarRule(f"{prefix}_norm_w", group, f"{source}.norm.weight", "BF16")
    yield SidecarRule("csa_idx_wq_b", "csa", "attn.indexer.wq_b.weight", "I8", transpose=True)
    yield SidecarRule("csa_idx_wq_b_scale", "csa", "attn.indexer.wq_b.scale", "F32")
    yield SidecarRule("csa_weights_proj", "csa", "attn.indexer.weights_proj.weight", "BF16", transpose=True)
    yield SidecarRule("csa_hadamard_idx", "csa", "", "BF16")


SIDECAR_RULES: tuple[SidecarRule, ...] = tuple(_rules())


def group_layers(config: ModelDimensions, group: str) -> list[int]:
    """Hidden layers of a rule's group, ascending."""
    ratio = {"fwd": None, "csa": 4, "hca": 128}[group]
    ratios = config.compress_ratios[: config.num_hidden_layers]
    return [layer for layer, own in enumerate(ratios) if ratio is None or own == ratio]


def layer_shape(config: ModelDimensions, rule: SidecarRule, ranks: int) -> tuple[int, ...]:
    """Shape of one layer's part of a stacked tensor on one rank; its first axis is the one that layers share."""
    hidden, width = config.hidden_size, config.moe_intermediate_size
    query = config.num_attention_heads * config.head_dim
    shared, experts = config.n_shared_experts * width, config.n_routed_experts
    mix = (2 + config.hc_mult) * config.hc_mult
    index_width = config.index_n_heads * config.index_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm_w": (hidden,),
        "norm_w": (hidden,),
        "wq_a": (hidden, config.q_lora_rank),
        "wq_b": (config.q_lora_rank, query),
        "wq_b_scale": (query,),
        "wkv": (hidden, config.head_dim),
        "gamma_cq": (config.q_lora_rank,),
        "gamma_ckv": (config.head_dim,),
        "attn_sink": (config.num_attention_heads,),
        "wo_a": (config.o_groups, config.o_lora_rank, query // config.o_groups),
        "wo_b": (hidden, config.o_groups * config.o_lora_rank),
        "wo_b_scale": (hidden,),
        "gate_w": (experts, hidden),
        "gate_bias": (experts,),
        "tid2eid": (config.vocab_size, config.num_experts_per_tok),
        "csa_idx_wq_b": (config.q_lora_rank, index_width),
        "csa_idx_wq_b_scale": (index_width,),
        "csa_weights_proj": (hidden, config.index_n_heads),
        "csa_hadamard_idx": (config.index_head_dim, config.index_head_dim),
    }
    for part in ("attn", "ffn"):
        shapes[f"hc_{part}_fn"] = (mix, config.hc_mult * hidden)
        shapes[f"hc_{part}_scale"] = (3,)
        shapes[f"hc_{part}_base"] = (mix,)
    for name, rows, columns in (("w1", width, hidden), ("w3", width, hidden), ("w2", hidden, width)):
        shared_rows, shared_columns = (shared, hidden) if name != "w2" else (hidden, shared)
        shapes[f"shared_{name}"] = (shared_rows, shared_columns)
        shapes[f"shared_{name}_scale"] = (shared_rows,)
        shapes[f"routed_{name}"] = (experts // ranks, rows, columns)
        shapes[f"routed_{name}_scale"] = (experts // ranks, rows)
    for prefix, ratio, overlap, size in (
        ("csa_cmp", 4, 2, config.head_dim),
        ("csa_inner", 4, 2, config.index_head_dim),
        ("hca_cmp", 128, 1, config.head_dim),
    ):
        shapes[f"{prefix}_wkv"] = shapes[f"{prefix}_wgate"] = (overlap * size, hidden)
        shapes[f"{prefix}_ape"] = (ratio, overlap * size)
        shapes[f"{prefix}_norm_w"] = (size,)
    return shapes[rule.name]


def stacked_shape(config: ModelDimensions, rule: SidecarRule, ranks: int) -> tuple[int, ...]:
    """Shape of a tensor in the sidecar."""
    first, *rest = layer_shape(config, rule, ranks)
    return (ranks, len(group_layers(config, rule.group)) * first, *rest)


def sidecar_path(directory: Path, ranks: int) -> Path:
    """Default path of the sidecar of a checkpoint."""
    return directory / f"pypto-deepseek-v4-stacked-r{ranks}.safetensors"


def source_fingerprint(directory: Path, config: ModelDimensions, weight_map: Mapping[str, str], ranks: int) -> str:
    """Fingerprint by file names, sizes and modification times, as other readers of the format compute it."""
    files = []
    for name in sorted(set(weight_map.values())):
        status = os.stat(directory / name)
        files.append([name, status.st_size, status.st_mtime_ns])
    return _fingerprint(config, weight_map, ranks, {"source_files": files})


def content_fingerprint(directory: Path, config: ModelDimensions, weight_map: Mapping[str, str], ranks: int) -> str:
    """Fingerprint by content: copies of a checkpoint have the same one.

    Shards up to 64 MiB are read whole, larger ones by their header and 64 windows of 64 KiB spread evenly.
    """
    files = [[name, *_content_sample(directory / name)] for name in sorted(set(weight_map.values()))]
    return _fingerprint(config, weight_map, ranks, {"source_contents": files})


def _fingerprint(
    config: ModelDimensions, weight_map: Mapping[str, str], ranks: int, files: Mapping[str, object]
) -> str:
    content = {
        "format": SIDECAR_FORMAT,
        "ranks": ranks,
        "n_routed_experts": config.n_routed_experts,
        "compress_ratios": list(config.compress_ratios[: config.num_hidden_layers]),
        "num_hash_layers": config.num_hash_layers,
        "weight_map": sorted([name, shard] for name, shard in weight_map.items()),
        **files,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _content_sample(path: Path) -> tuple[int, str]:
    with SafetensorsFile(path) as file:
        digest = xxhash.xxh3_128()
        if file.size <= _WHOLE_FILE_BYTES:
            digest.update(file.pread(0, file.size))
        else:
            digest.update(file.pread(0, file.payload_begin))
            last = file.size - _SAMPLE_BYTES
            for window in range(_SAMPLE_WINDOWS):
                digest.update(file.pread(last * window // (_SAMPLE_WINDOWS - 1), _SAMPLE_BYTES))
        return file.size, digest.hexdigest()


@dataclass(frozen=True)
class SidecarDecision:
    """What start-up does with a sidecar.

    Attributes:
        tensors: mapped read-only zero-copy tensors that processes share; None if the shards are to be packed.
        state: ``mapped``, ``missing``, ``stale``, ``cold`` or ``corrupt``.
        reason: one line for the log, with the remedy.
    """

    tensors: dict[str, torch.Tensor] | None
    state: str
    reason: str


def open_sidecar(
    directory: str | os.PathLike[str],
    config: ModelDimensions,
    weight_map: Mapping[str, str],
    *,
    ranks: int = DEFAULT_RANKS,
    path: Path | None = None,
    read_if_cold: bool = True,
) -> SidecarDecision:
    """Map the sidecar of a checkpoint if it is whole, belongs to the shards, and is (or fits) in memory.

    Args:
        directory: the W8A8 checkpoint.
        weight_map: of its ``model.safetensors.index.json``.
        path: the sidecar, where it is not at its default place.
        read_if_cold: read a cold sidecar sequentially first, where memory for it is available, instead of refusing it:
            page faults over a cold file are slower than packing the shards, a sequential read is not.

    The decision is logged in one line.
    """
    decision = _decide(Path(directory), config, weight_map, ranks, path, read_if_cold)
    level = logging.WARNING if decision.state in ("stale", "corrupt") else logging.INFO
    _logger.log(level, "%s", decision.reason)
    return decision


def _decide(
    directory: Path,
    config: ModelDimensions,
    weight_map: Mapping[str, str],
    ranks: int,
    path: Path | None,
    read_if_cold: bool,
) -> SidecarDecision:
    path = path or sidecar_path(directory, ranks)
    rebuild = f"dsv4 prepack {directory} --ranks {ranks} --force"
    if not path.exists():
        reason = f"no sidecar {path}: packing from the shards; make one with: dsv4 prepack {directory} --ranks {ranks}"
        return SidecarDecision(None, "missing", reason)
    try:
        # One descriptor for all steps, so that a file replaced meanwhile is not mixed up with its successor.
        with SafetensorsFile(path) as file:
            problem = why_stale(file, directory, config, weight_map, ranks)
            if problem:
                return SidecarDecision(
                    None, "stale", f"sidecar {path} is stale ({problem}): packing from the shards; remedy: {rebuild}"
                )
            problem = why_corrupt(file, config, ranks)
            if problem:
                raise CheckpointError(problem)
            share = resident_share(file.fileno(), file.size)
            if (share is None or share < HOT_SHARE) and not (read_if_cold and _fits_in_memory(file.size)):
                known = "unknown" if share is None else f"{100 * share:.0f} %"
                return SidecarDecision(
                    None,
                    "cold",
                    f"sidecar {path} is cold ({known} in memory): packing from the shards; "
                    f"remedy: dsv4 prepack {directory} --ranks {ranks} --warm",
                )
            if share is None or share < HOT_SHARE:
                read_into_page_cache(file)
            tensors = {rule.name: file.tensor(rule.name) for rule in SIDECAR_RULES}
    except (CheckpointError, OSError) as error:
        reason = f"sidecar {path} is corrupt ({error}): packing from the shards; remedy: {rebuild}"
        return SidecarDecision(None, "corrupt", reason)
    return SidecarDecision(tensors, "mapped", f"sidecar {path} mapped: {file.size / 1e9:.2f} GB shared by all ranks")


def why_stale(
    file: SafetensorsFile, directory: Path, config: ModelDimensions, weight_map: Mapping[str, str], ranks: int
) -> str | None:
    """Why a sidecar does not belong to these shards; None if it does, by their times or else by their contents."""
    if file.metadata.get("format") != SIDECAR_FORMAT:
        return f"format {file.metadata.get('format')!r}"
    try:
        by_time = source_fingerprint(directory, config, weight_map, ranks) == file.metadata.get(FINGERPRINT_KEY)
        # A change of content always moves the change time, even where size and modification time were kept.
        untouched = all(
            os.stat(directory / name).st_ctime_ns < file.identity.ctime_ns for name in set(weight_map.values())
        )
        content = file.metadata.get(CONTENT_KEY)
        # A sidecar that another tool wrote has no fingerprint of the content: file times decide alone.
        matches = by_time and (untouched or content is None)
        if not matches and content is not None:
            matches = content_fingerprint(directory, config, weight_map, ranks) == content
    except (OSError, CheckpointError) as error:
        return f"cannot read the shards: {error}"
    if not matches:
        return "the shards are not those it was made from"
    if set(file.entries) != {rule.name for rule in SIDECAR_RULES}:
        return "it holds other tensors"
    return None


def why_corrupt(file: SafetensorsFile, config: ModelDimensions, ranks: int) -> str | None:
    """Which tensor of a sidecar with the right names has a wrong type, shape or place; None if all are right."""
    for rule in SIDECAR_RULES:
        entry = file.entries[rule.name]
        if entry.dtype != rule.dtype or entry.shape != stacked_shape(config, rule, ranks):
            expected = f"{rule.dtype} {list(stacked_shape(config, rule, ranks))}"
            return f"tensor {rule.name} is {entry.dtype} {list(entry.shape)}, expected {expected}"
        if entry.begin % DTYPE_BYTES[entry.dtype]:
            return f"tensor {rule.name} is not aligned"
    return None


def resident_share(descriptor: int, size: int) -> float | None:
    """Share of a file's pages in memory, from 64 windows of 4 MiB spread evenly (all of a file up to 256 MiB).

    None where the system cannot tell.
    """
    if size == 0:
        return 1.0
    if size <= _RESIDENCY_WHOLE_FILE_BYTES:
        windows = [(0, size)]
    else:
        last = (size - _RESIDENCY_WINDOW_BYTES) // mmap.PAGESIZE
        starts = (last * window // (_SAMPLE_WINDOWS - 1) * mmap.PAGESIZE for window in range(_SAMPLE_WINDOWS))
        windows = [(start, _RESIDENCY_WINDOW_BYTES) for start in starts]
    resident = total = 0
    for start, length in windows:
        flags = _resident_pages(descriptor, start, min(length, size - start))
        if flags is None:
            return None
        resident += sum(flags)
        total += len(flags)
    return resident / total


def _resident_pages(descriptor: int, start: int, length: int) -> list[int] | None:
    mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
    if mincore is None:
        return None
    # A private mapping is writable for ctypes; nothing is written, and mapping reads nothing from the file.
    with mmap.mmap(descriptor, length, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=start) as mapping:
        pages = -(-length // mmap.PAGESIZE)
        flags = (ctypes.c_ubyte * pages)()
        view = ctypes.c_char.from_buffer(mapping)
        try:
            failed = mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(length), flags)
        finally:
            del view
    return None if failed else [flag & 1 for flag in flags]


def _fits_in_memory(size: int) -> bool:
    """Whether the system has that much memory available; False where it cannot tell."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 >= size
    except OSError:
        pass
    return False


def read_into_page_cache(file: SafetensorsFile, advance: Callable[[int], None] | None = None) -> None:
    """Read a file sequentially, so that mapping it finds its pages in memory. ``advance`` is told the bytes read."""
    buffer = bytearray(_READ_BYTES)
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    for offset in range(0, file.size, _READ_BYTES):
        view = memoryview(buffer)[: min(_READ_BYTES, file.size - offset)]
        file.pread_into(offset, view)
        if advance is not None:
            advance(len(view))
