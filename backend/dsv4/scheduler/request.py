"""State of one request as the scheduler sees it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from dsv4.cache.block_allocator import BlockTable
from dsv4.cache.prefix_index import PageKeys


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A request between `add` and `finish`.

    Attributes:
        token_ids: prompt and output so far; all of it is recomputed after a preemption.
        max_total_tokens: length at which the request ends for its length.
        num_speculative_tokens: most drafts per step; 0 for sampled requests.
        priority: lower runs first; equal priorities in order of arrival.
        deadline: monotonic seconds, None for none.
        num_computed: positions whose caches are written and valid.
        draft_token_ids: drafts for the positions after the last token, checked in the next decode step.
        slot: index of the request's state in the executor while it runs.
        page_keys: of the complete pages of `token_ids`, when prefixes are cached.
        num_cached_tokens: prompt positions that were found in the cache when the request first ran.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    max_total_tokens: int
    num_speculative_tokens: int = 0
    priority: int = 0
    deadline: float | None = None
    arrival: int = 0
    status: RequestStatus = RequestStatus.WAITING
    num_computed: int = 0
    draft_token_ids: list[int] = field(default_factory=list)
    table: BlockTable | None = None
    slot: int | None = None
    num_preemptions: int = 0
    page_keys: PageKeys = field(default_factory=PageKeys)
    num_cached_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def decoding(self) -> bool:
        """Only the newest token is left to compute."""
        return self.num_computed == self.num_tokens - 1 and self.num_tokens > self.num_prompt_tokens

    @property
    def order(self) -> tuple[int, int]:
        return self.priority, self.arrival
