"""Which rows of which requests the next step computes. Pure: no clock, no I/O, no tensors.

Decode rows and prefill chunks share one step, so a running request never waits for a prompt and a prompt never waits
for a running request. Requests are served first come, first served within a priority; prompts that wait together share
the rows of a step, so that a short one gets through beside a long one. When a partition runs out of blocks its newest
request is preempted and later recomputes prompt and output, so nothing is lost or sent twice.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from dsv4.cache.block_allocator import BlockAllocator, BlockTable
from dsv4.cache.groups import MAX_ROWS_PER_SEQUENCE
from dsv4.errors import ErrorCode, RequestError
from dsv4.scheduler.request import Request, RequestStatus

PREFILL_SHARE = 4
"""While a prompt waits, drafts leave it at least one part in four of the step's budget."""

RESERVED_LOT = 32

MAX_SHARING_PROMPTS = 4
"""So many prompts at most share the rows of a step; with more, each would take ever longer to its first token."""


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of a step.

    Attributes:
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: rows of one step, drafts included.
        max_prefill_extent: prompt rows of one request in one step.
        max_model_len: positions of one request.
        max_queued_requests: waiting requests; more are refused.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_extent: int
    max_model_len: int
    max_queued_requests: int


@dataclass(frozen=True)
class ScheduledRows:
    """Consecutive positions of one request in one step.

    Attributes:
        start: first position.
        num_tokens: known tokens to compute from there.
        draft_token_ids: drafts verified after them.
        samples: the rows reach the newest token, so the step yields new ones.
    """

    request: Request
    start: int
    num_tokens: int
    draft_token_ids: tuple[int, ...]
    samples: bool

    @property
    def num_rows(self) -> int:
        return self.num_tokens + len(self.draft_token_ids)


@dataclass
class StepPlan:
    """One step: rows in the order of admission."""

    rows: list[ScheduledRows] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(row.num_rows for row in self.rows)


class Scheduler:
    """Queues of waiting and running requests. Verbs: add, schedule, update, finish."""

    def __init__(self, limits: SchedulerLimits, allocator: BlockAllocator) -> None:
        self.limits = limits
        self.allocator = allocator
        self.requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._arrivals = 0
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError QUEUE_FULL, or INVALID_ARGUMENT for an id that is in use."""
        if request.request_id in self.requests:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"request_id: {request.request_id!r} is already running")
        if len(self._waiting) >= self.limits.max_queued_requests:
            raise RequestError(
                ErrorCode.QUEUE_FULL,
                f"{len(self._waiting)} requests wait, the limit is {self.limits.max_queued_requests}; try again later",
            )
        request.arrival = self._arrivals
        self._arrivals += 1
        self.requests[request.request_id] = request
        bisect.insort(self._waiting, request, key=lambda waiting: waiting.order)

    def finish(self, request: Request) -> None:
        """Take a request out in whatever state it is and free what it holds."""
        if request.status is RequestStatus.FINISHED:
            return
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._release(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]

    def expired(self, now: float) -> list[Request]:
        """Requests whose deadline has passed."""
        return [
            request for request in self.requests.values() if request.deadline is not None and now >= request.deadline
        ]

    def schedule(self) -> StepPlan:
        """Choose the rows of the next step and allocate their blocks."""
        plan = StepPlan()
        scheduled: dict[Request, ScheduledRows] = {}
        budget = self.limits.max_num_batched_tokens
        prefill_waits = bool(self._waiting) or any(not request.decoding for request in self._running)
        decodes = [request for request in self._running if request.decoding]
        draft_budget = budget - len(decodes)
        if prefill_waits:
            draft_budget -= budget // PREFILL_SHARE

        for request in decodes:
            if budget < 1 or request.status is not RequestStatus.RUNNING:
                continue
            drafts = tuple(request.draft_token_ids[: max(0, min(draft_budget, budget - 1))])
            if self._ensure_blocks(request, self._reserved_tokens(request, request.num_tokens), plan, scheduled):
                scheduled[request] = ScheduledRows(request, request.num_computed, 1, drafts, samples=True)
                budget -= 1 + len(drafts)
                draft_budget -= len(drafts)

        share = self._prompt_share(budget)
        for request in list(self._running):
            if budget < 1:
                break
            if request.status is RequestStatus.RUNNING and request not in scheduled and not request.decoding:
                rows = self._prefill_rows(request, min(budget, share))
                if self._ensure_blocks(
                    request, self._reserved_tokens(request, rows.start + rows.num_tokens), plan, scheduled
                ):
                    scheduled[request] = rows
                    budget -= rows.num_rows

        if not plan.preempted:
            self._admit(budget, share, scheduled)
        plan.rows = list(scheduled.values())
        return plan

    def update(self, rows: ScheduledRows, new_token_ids: Iterable[int], draft_token_ids: Iterable[int]) -> None:
        """Record what a step computed for a request: accepted drafts and the token after them, and the next drafts."""
        request = rows.request
        new = list(new_token_ids)
        accepted = max(0, len(new) - 1)
        request.num_computed = rows.start + rows.num_tokens + accepted
        request.token_ids.extend(new)
        request.draft_token_ids = list(draft_token_ids)
        hasher = self.allocator.prefix_hasher
        if hasher is not None and request.table is not None:
            hasher.extend(request.page_keys, request.token_ids)
            self.allocator.commit(request.table, request.page_keys, request.num_computed)

    def _prefill_rows(self, request: Request, budget: int) -> ScheduledRows:
        remaining = request.num_tokens - request.num_computed
        extent = min(remaining, budget, self.limits.max_prefill_extent)
        return ScheduledRows(request, request.num_computed, extent, (), samples=extent == remaining)

    def _reserved_tokens(self, request: Request, num_tokens: int) -> int:
        """Positions that a step may write: the rows, their drafts, and those of the prediction layer's own drafts."""
        needed = num_tokens + 2 * request.num_speculative_tokens + 1
        # In whole lots, so that most steps find their blocks in place.
        return min(-(-needed // RESERVED_LOT) * RESERVED_LOT, self.limits.max_model_len)

    def _prompt_share(self, budget: int) -> int:
        """Rows that one prompt may have of the step's remaining `budget`, in whole tiles."""
        prompts = sum(not request.decoding for request in self._running)
        prompts += min(len(self._waiting), len(self._free_slots))
        share = -(-budget // max(1, min(prompts, MAX_SHARING_PROMPTS)))
        return max(MAX_ROWS_PER_SEQUENCE, -(-share // MAX_ROWS_PER_SEQUENCE) * MAX_ROWS_PER_SEQUENCE)

    def _admit(self, budget: int, share: int, scheduled: dict[Request, ScheduledRows]) -> None:
        while self._waiting and self._free_slots and budget > 0:
            request = self._waiting[0]
            # Room for all tokens known, not just the first chunk: a half-admitted prompt would only be preempted.
            table = self._open_table(request)
            if table is None:
                return
            self._waiting.pop(0)
            self._start(request, table)
            rows = self._prefill_rows(request, min(budget, share))
            scheduled[request] = rows
            budget -= rows.num_rows

    def _open_table(self, request: Request) -> BlockTable | None:
        reserved = self._reserved_tokens(request, request.num_tokens)
        hasher = self.allocator.prefix_hasher
        if hasher is None:
            return self.allocator.open_table(reserved)
        hasher.extend(request.page_keys, request.token_ids)
        # At least one row must be computed, or there would be nothing to choose the next token from.
        return self.allocator.open_table(reserved, request.page_keys, request.num_tokens - 1)

    def _start(self, request: Request, table: BlockTable) -> None:
        request.table = table
        request.slot = self._free_slots.pop()
        request.status = RequestStatus.RUNNING
        request.num_computed = table.num_cached_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = table.num_cached_tokens
        request.draft_token_ids = []
        bisect.insort(self._running, request, key=lambda running: running.order)

    def _ensure_blocks(
        self, request: Request, num_tokens: int, plan: StepPlan, scheduled: dict[Request, ScheduledRows]
    ) -> bool:
        """Extend the request's table, preempting newer requests of its partition while it lacks blocks."""
        assert request.table is not None
        while not self.allocator.extend(request.table, num_tokens):
            victim = max(
                (other for other in self._running if other.table and other.table.partition == request.table.partition),
                key=lambda other: other.order,
            )
            self._preempt(victim, plan)
            scheduled.pop(victim, None)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        self._running.remove(request)
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_computed = 0
        request.draft_token_ids = []
        request.num_preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self._waiting, request, key=lambda waiting: waiting.order)
        plan.preempted.append(request)

    def _release(self, request: Request) -> None:
        assert request.table is not None
        assert request.slot is not None
        self.allocator.close_table(request.table)
        self._free_slots.append(request.slot)
        request.table = None
        request.slot = None
