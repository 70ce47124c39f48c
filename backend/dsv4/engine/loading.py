"""From an EngineConfig to a core that is ready to step."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from dsv4.cache.block_allocator import BlockAllocator
from dsv4.cache.groups import cache_groups
from dsv4.cache.prefix_index import PageHasher
from dsv4.chat import ChatTokenizer
from dsv4.checkpoint import load_weights
from dsv4.config import EngineConfig, ModelConfig
from dsv4.default_model import resolve_model
from dsv4.engine.core import EngineCore, ModelFacts
from dsv4.engine.faults import Faults
from dsv4.engine.local_executor import LocalExecutor
from dsv4.errors import ConfigurationError, EngineStartError
from dsv4.model import DeepseekV4Model
from dsv4.model.cache_pools import CachePools, block_bytes
from dsv4.scheduler.scheduler import Scheduler, SchedulerLimits


def load_engine(config: EngineConfig, *, faults: Faults | None = None, progress: Callable[[str], None]) -> EngineCore:
    """Load the model and build the engine. Raises Dsv4Error subclasses with the reason."""
    check_backend(config)
    (faults or Faults()).on_start()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    started = time.monotonic()
    directory = resolve_model(config.model, progress=progress)
    model_config = ModelConfig.from_directory(directory)
    _check_model(config, model_config)
    max_model_len = config.resolve_max_model_len(model_config.max_position_embeddings)
    tokenizer = ChatTokenizer.from_directory(directory) if (directory / "tokenizer.json").is_file() else None
    progress(f"loading weights from {directory}")
    weights = load_weights(directory, model_config, numerics=config.numerics)
    model = DeepseekV4Model(model_config, weights, numerics=config.numerics)
    progress(f"weights loaded in {time.monotonic() - started:.1f} s")

    num_mtp_layers = model_config.num_nextn_predict_layers if config.num_drafts else 0
    groups = cache_groups(sliding_window=model_config.sliding_window, max_model_len=max_model_len)
    slot_bytes = sum(
        group.blocks_per_request
        * block_bytes(model_config, group, numerics=config.numerics, num_mtp_layers=num_mtp_layers)
        for group in groups
    )
    slots = _slots_per_partition(config, slot_bytes, max_model_len)
    allocator = BlockAllocator(
        groups,
        slots_per_partition=slots,
        num_partitions=config.dp,
        prefix_hasher=PageHasher(covers_next_token=num_mtp_layers > 0) if config.enable_prefix_caching else None,
        max_requests_per_partition=math.ceil(config.max_num_seqs / config.dp),
    )
    pools = CachePools(
        model_config,
        groups,
        allocator.num_blocks,
        numerics=config.numerics,
        num_mtp_layers=num_mtp_layers,
        fill_nan=config.debug_fill_nan,
    )
    progress(
        f"cache: {config.dp} partitions of {slots} requests of {max_model_len} tokens, "
        f"{pools.num_bytes / 2**20:.0f} MiB"
    )
    scheduler = Scheduler(
        SchedulerLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_prefill_extent=min(config.prefill_extent, max_model_len),
            max_model_len=max_model_len,
            max_queued_requests=config.max_queued_requests,
        ),
        allocator,
    )
    executor = LocalExecutor(model, pools, groups, max_num_seqs=config.max_num_seqs)
    facts = ModelFacts(
        vocab_size=model_config.vocab_size,
        bos_token_id=model_config.bos_token_id,
        eos_token_ids=frozenset(model_config.eos_token_id).union([tokenizer.eos_token_id] if tokenizer else []),
        max_model_len=max_model_len,
        num_speculative_tokens=config.num_drafts,
    )
    core = EngineCore(
        facts,
        scheduler,
        executor,
        tokenizer,
        seed=config.seed,
        default_timeout=config.request_timeout_seconds,
        profile_directory=None if config.profile_output is None else Path(config.profile_output),
        faults=faults,
    )
    core.warm_up()
    progress(f"engine ready after {time.monotonic() - started:.1f} s")
    return core


def check_backend(config: EngineConfig) -> None:
    """Raise EngineStartError when the backend asked for is not there."""
    if config.backend in (None, "cpu"):
        return
    if config.backend == "npu":
        if importlib.util.find_spec("pypto_serving") is None:
            raise EngineStartError(
                "backend npu: the package pypto_serving is not installed here; install PyPTO Serving on a machine with "
                "eight Ascend NPUs, or use --backend cpu"
            )
        raise EngineStartError("backend npu: not available in this build; use --backend cpu")
    raise EngineStartError(f"backend {config.backend}: not available in this build; use --backend cpu")


def _check_model(config: EngineConfig, model_config: ModelConfig) -> None:
    """Check what needs both configurations."""
    if config.num_drafts and model_config.num_nextn_predict_layers == 0:
        raise ConfigurationError("--speculative-config: the checkpoint has no MTP layer; drop the flag")
    if model_config.n_routed_experts % config.dp:
        raise ConfigurationError(
            f"--ep: {model_config.n_routed_experts} experts cannot be divided by {config.dp} ranks"
        )


def _slots_per_partition(config: EngineConfig, slot_bytes: int, max_model_len: int) -> int:
    """Requests of maximal length per partition within the memory budget, not more than can run."""
    wanted = math.ceil(config.max_num_seqs / config.dp)
    budget = config.kv_cache_memory
    if budget is None:
        budget = int(psutil.virtual_memory().available * config.memory_utilization)
    affordable = budget // (slot_bytes * config.dp)
    if affordable < 1:
        raise ConfigurationError(
            f"--kv-cache-memory: {config.dp} partitions need at least {slot_bytes * config.dp} bytes for one request "
            f"of --max-model-len {max_model_len} each, there are {budget}; raise it or lower --max-model-len"
        )
    return min(affordable, wanted)
