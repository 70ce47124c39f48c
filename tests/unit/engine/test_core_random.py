"""Random arrivals, aborts, deadlines and shortage of blocks: whatever happens, every answer is the oracle's."""

from __future__ import annotations

from dsv4.scheduler.request import RequestStatus
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.engine.toy_engine import ToyEngine
from tests.unit.engine.toy_model import VOCABULARY, continuation

PREFIXES = [[seed * 5 % VOCABULARY, seed] * 80 for seed in range(3)]
"""Prompts that begin alike, so that shared pages would show."""


class EngineMachine(RuleBasedStateMachine):
    """Requests come and go; the scheduler's books and all outputs are checked after every action."""

    @initialize(
        drafts=st.sampled_from([0, 1, 2, 3, 5, 9]),
        slots=st.integers(1, 3),
        partitions=st.sampled_from([1, 2]),
        seqs=st.integers(1, 6),
        budget=st.sampled_from([8, 32, 130, 512]),
        agreement=st.sampled_from([0.0, 0.6, 1.0]),
        prefix_caching=st.booleans(),
    )
    def start(
        self,
        drafts: int,
        slots: int,
        partitions: int,
        seqs: int,
        budget: int,
        agreement: float,
        prefix_caching: bool,
    ) -> None:
        self.engine = ToyEngine(
            drafts=drafts,
            slots=slots,
            partitions=partitions,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_prefill_extent=min(budget, 200),
            agreement=agreement,
            prefix_caching=prefix_caching,
        )
        self.prompts: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.gone: set[str] = set()

    @rule(
        prefix=st.sampled_from(PREFIXES),
        shared=st.integers(0, 160),
        tail=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=60),
        max_tokens=st.integers(1, 60),
        priority=st.integers(0, 2),
        timeout=st.sampled_from([None, None, None, 30.0]),
    )
    def arrive(
        self, prefix: list[int], shared: int, tail: list[int], max_tokens: int, priority: int, timeout: float | None
    ) -> None:
        name = str(len(self.prompts))
        self.prompts[name] = prefix[:shared] + tail
        self.lengths[name] = max_tokens
        self.engine.add(name, self.prompts[name], max_tokens=max_tokens, priority=priority, timeout=timeout)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.prompts)))
        self.engine.core.abort(name)
        self.gone.add(name)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.now += 1.0
            self.engine.step()

    @invariant()
    def outputs_are_a_prefix_of_the_oracle(self) -> None:
        for name, prompt in getattr(self, "prompts", {}).items():
            tokens = self.engine.tokens(name)
            assert tokens == continuation(prompt, len(tokens))

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "engine"):
            return
        allocator, requests = self.engine.allocator, self.engine.scheduler.requests.values()
        running = [request for request in requests if request.status is RequestStatus.RUNNING]
        slots = [request.slot for request in running]
        assert len(set(slots)) == len(slots)
        for index, group in enumerate(allocator.groups):
            holders: dict[int, int] = {}
            for request in running:
                assert request.table is not None
                for block in request.table.held_blocks(index):
                    holders[block] = holders.get(block, 0) + 1
                    per_partition = allocator.blocks_per_partition[index]
                    assert block // per_partition == request.table.partition
            allocator.check(group.name, holders)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        for name, prompt in self.prompts.items():
            if name in self.gone:
                continue
            end = self.engine.end(name)
            if end.error is None:
                assert self.engine.tokens(name) == continuation(prompt, self.lengths[name])
            else:
                assert end.error.startswith("[DEADLINE]")
        assert all(use.used == 0 for use in self.engine.allocator.use().values())


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
