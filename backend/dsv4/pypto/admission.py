"""How many requests upstream's engine is given at once; the others wait here, in order of priority and arrival.

Upstream fails a whole batch when one rank gets more decode rows than its tile has, and computes wrong tokens for a
request that it preempts. Both are kept from happening by never handing it more requests than fit: it puts a new
request on the rank with the fewest, so `ranks * n` live requests never put more than `n` on one rank. A shared prefix,
though, goes to the rank that has it cached however full that is, so with prefix caching `n` is the limit for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator

from dsv4.errors import ErrorCode, RequestError
from dsv4.pypto.options import PyptoOptions, rows_per_rank


def live_request_limit(options: PyptoOptions, *, ranks: int, slots_per_rank: int | None) -> int:
    """Requests that may be in upstream's engine at once.

    Args:
        slots_per_rank: sequences of full length that the caches of one rank hold; None when unknown.
    """
    rows = rows_per_rank(options.speculation.draft_tokens)
    per_rank = rows if slots_per_rank is None else max(1, min(rows, slots_per_rank))
    return min(options.max_num_seqs, per_rank if options.prefix_caching else ranks * per_rank)


class Admission:
    """A bounded queue in front of a number of places. Used within one event loop."""

    def __init__(self, places: int, max_waiting: int) -> None:
        self._free = places
        self._max_waiting = max_waiting
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Requests without a place."""
        return sum(not future.done() for _, _, future in self._waiting)

    @contextlib.asynccontextmanager
    async def place(self, priority: int) -> AsyncIterator[None]:
        """Hold one place; wait for it if need be. Raises RequestError QUEUE_FULL when too many wait already."""
        await self._acquire(priority)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, priority: int) -> None:
        if self._free > 0 and not self.num_waiting:
            self._free -= 1
            return
        if self.num_waiting >= self._max_waiting:
            raise RequestError(ErrorCode.QUEUE_FULL, f"{self._max_waiting} requests wait already; try again later")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._arrivals), future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            _, _, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)
                return
        self._free += 1
