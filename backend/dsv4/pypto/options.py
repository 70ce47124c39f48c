"""What the PyPTO engine is configured with: upstream's own flags, and limits of ours around it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsv4.errors import ConfigurationError

ROWS_PER_RANK = {0: 8, 1: 8, 2: 4, 3: 4}
"""Decode rows of one rank by the number of draft tokens; from four on there are two (tiles B8S1, B8S2, B4S4, B2S8)."""

ENGINE_FLAGS = (
    "platform",
    "devices",
    "dp",
    "ep",
    "tp",
    "data_parallel_routing",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "enable_chunked_prefill",
    "npu_memory_utilization",
    "dtype",
    "kv_cache_dtype",
    "speculative_config",
    "num_speculative_tokens",
    "enable_mtp",
    "ring_dep_pool",
    "ring_task_window",
    "ring_heap",
    "use_compile_cache",
    "profile",
    "profile_output",
    "profile_level",
    "enable_prefix_caching",
)
"""Flags that belong to upstream's engine; all others concern our server."""


@dataclass(frozen=True)
class Speculation:
    """How drafts are made. `draft_tokens` 0 means none."""

    method: str = "none"
    draft_tokens: int = 0


@dataclass(frozen=True)
class PyptoOptions:
    """Settings of one PyPTO engine.

    Attributes:
        model: directory of the converted checkpoint.
        flags: engine flags under their command line names without the dashes and with underscores, such as
            `max_model_len`; they reach upstream's own parser unchanged. True is a flag without value, False its
            `--no-` form, None is not given.
        max_queued_requests: requests that may wait for admission; more are refused with QUEUE_FULL.
        start_timeout_seconds: loading weights and building kernels may take so long.
        step_timeout_seconds: a step without result for so long means that the device hangs.
        stop_timeout_seconds: an orderly stop may take so long before the worker is killed.
        poll_seconds: how often the worker is looked at.
    """

    model: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    max_queued_requests: int = 512
    start_timeout_seconds: float = 1800.0
    step_timeout_seconds: float = 60.0
    stop_timeout_seconds: float = 30.0
    poll_seconds: float = 0.25

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together."""
        return int(self.flags.get("max_model_len") or 1024)

    @property
    def max_num_seqs(self) -> int:
        """Requests that may run at once."""
        return int(self.flags.get("max_num_seqs") or 16)

    @property
    def speculation(self) -> Speculation:
        """Method and depth of speculative decoding, from any of its flags."""
        return read_speculation(self.flags)

    @property
    def prefix_caching(self) -> bool:
        """Whether upstream shares prefixes: as asked for, except that it does not with more than one draft token."""
        return self.flags.get("enable_prefix_caching") is True and self.speculation.draft_tokens <= 1


def read_speculation(flags: Mapping[str, Any]) -> Speculation:
    """Method and number of draft tokens from `speculative_config`, `num_speculative_tokens` or `enable_mtp`.

    Raises ConfigurationError for a `speculative_config` that is not a JSON object with a method and a number.
    """
    configuration = flags.get("speculative_config")
    if configuration is not None:
        if isinstance(configuration, str):
            try:
                configuration = json.loads(configuration)
            except ValueError as error:
                raise ConfigurationError(f"--speculative-config: not valid JSON ({error})") from None
        if not isinstance(configuration, Mapping):
            raise ConfigurationError("--speculative-config: must be a JSON object")
        depth = configuration.get("num_speculative_tokens")
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise ConfigurationError("--speculative-config: num_speculative_tokens must be a whole number, 0 or more")
        return Speculation(str(configuration.get("method")), depth)
    depth = flags.get("num_speculative_tokens")
    if depth is None:
        depth = 1 if flags.get("enable_mtp") else 0
    return Speculation("mtp" if depth else "none", int(depth))


def rows_per_rank(draft_tokens: int) -> int:
    """Requests that one rank decodes in one step."""
    return ROWS_PER_RANK.get(draft_tokens, 2)
