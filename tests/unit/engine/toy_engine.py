"""A whole engine around the network double."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dsv4.cache.block_allocator import BlockAllocator
from dsv4.cache.groups import cache_groups
from dsv4.cache.prefix_index import PageHasher
from dsv4.engine.core import EngineCore, ModelFacts
from dsv4.engine.local_executor import LocalExecutor
from dsv4.engine.protocol import GenerateRequest, RequestOutput
from dsv4.sampling_parameters import SamplingParameters
from dsv4.scheduler.scheduler import Scheduler, SchedulerLimits

from tests.unit.engine.toy_model import VOCABULARY, ToyModel, ToyPools

EOS = VOCABULARY + 1  # never generated


class ToyEngine:
    """The engine, its clock, and everything it has put out by request."""

    def __init__(
        self,
        *,
        drafts: int = 0,
        max_model_len: int = 300,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        max_prefill_extent: int = 256,
        max_queued_requests: int = 1000,
        slots: int = 2,
        partitions: int = 1,
        agreement: float = 0.7,
        eos: int = EOS,
        tokenizer: Any = None,
        prefix_caching: bool = False,
        model: ToyModel | None = None,
        vocabulary: int = VOCABULARY,
    ) -> None:
        self.now = 0.0
        groups = cache_groups(sliding_window=128, max_model_len=max_model_len)
        self.allocator = BlockAllocator(
            groups,
            slots_per_partition=slots,
            num_partitions=partitions,
            prefix_hasher=PageHasher(covers_next_token=drafts > 0) if prefix_caching else None,
            max_requests_per_partition=-(-max_num_seqs // partitions),
        )
        limits = SchedulerLimits(
            max_num_seqs, max_num_batched_tokens, max_prefill_extent, max_model_len, max_queued_requests
        )
        self.scheduler = Scheduler(limits, self.allocator)
        self.model = model or ToyModel(agreement)
        self.pools = ToyPools(groups, self.allocator.num_blocks)
        executor = LocalExecutor(self.model, self.pools, groups, max_num_seqs=max_num_seqs)  # type: ignore[arg-type]
        facts = ModelFacts(vocabulary, 0, frozenset({eos}), max_model_len, drafts)
        self.core = EngineCore(facts, self.scheduler, executor, tokenizer, clock=lambda: self.now)
        self.outputs: dict[str, list[RequestOutput]] = {}

    def add(
        self,
        name: str,
        prompt: Iterable[int],
        *,
        timeout: float | None = None,
        output_format: dict[str, Any] | None = None,
        **parameters: Any,
    ) -> None:
        self.outputs[name] = []
        self.core.add(
            GenerateRequest(
                request_id=name,
                prompt_token_ids=list(prompt),
                sampling_parameters=SamplingParameters(**parameters),
                timeout_seconds=timeout,
                output_format=output_format,
            )
        )

    def step(self) -> list[RequestOutput]:
        outputs = self.core.step()
        for output in outputs:
            assert not any(earlier.finished for earlier in self.outputs[output.request_id])
            self.outputs[output.request_id].append(output)
        return outputs

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"still working after {max_steps} steps")

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]

    def text(self, name: str) -> str:
        return "".join(output.text for output in self.outputs[name])

    def end(self, name: str) -> RequestOutput:
        assert self.outputs[name][-1].finished
        return self.outputs[name][-1]
