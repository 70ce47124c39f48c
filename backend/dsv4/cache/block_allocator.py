"""Blocks of the grouped cache: who owns which, per partition. Pure bookkeeping, no tensors."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dsv4.cache.groups import CacheGroup, GroupKind
from dsv4.cache.prefix_index import PAGE_TOKENS, PageHasher, PageKeys, PrefixIndex

NO_BLOCK = -1

HISTORY_RESERVE = 4
"""Ring blocks are kept for later hits only while more than one block in four of the partition is free."""


@dataclass(frozen=True)
class _Switch:
    """From `position` on, a ring slot is another block, which holds `logical`; the old one keeps what it holds."""

    position: int
    group: int
    slot: int
    logical: int
    block: int


@dataclass(eq=False)
class BlockTable:
    """The blocks of one request in every group.

    Attributes:
        partition: the rank that holds the request's cache, fixed until the request leaves.
        blocks: one array [blocks_per_request] int64 a group, physical block ids, NO_BLOCK where none is held.
        num_logical: blocks of the sequence that have been given a place so far, per group; in rings they took turns.
        num_covered: positions that have blocks in every group.
        num_cached_tokens: positions that were found computed when the table was opened.
        num_published_pages: pages that are in the prefix index or were considered for it.
        version: grows with every change of `blocks`, so that a copy elsewhere knows when it is stale.
    """

    partition: int
    blocks: list[npt.NDArray[np.int64]]
    num_logical: list[int]
    num_covered: int = 0
    num_cached_tokens: int = 0
    num_published_pages: int = 0
    version: int = 0
    _switches: deque[_Switch] = field(default_factory=deque)
    _retired: list[tuple[int, int, int]] = field(default_factory=list)

    def advance(self, end: int) -> None:
        """Make the table fit for rows up to position `end` - 1. To be called before rows are computed, in order."""
        while self._switches and self._switches[0].position < end:
            switch = self._switches.popleft()
            table = self.blocks[switch.group]
            held = switch.logical - len(table)
            self._retired.append((switch.group, held, int(table[switch.slot])))
            table[switch.slot] = switch.block
            self.version += 1

    def held_blocks(self, group: int) -> list[int]:
        """All blocks of a group that the table holds, those of the past and the future of a step included."""
        current = self.blocks[group]
        return [
            *current[current != NO_BLOCK].tolist(),
            *(switch.block for switch in self._switches if switch.group == group),
            *(block for retired_group, _, block in self._retired if retired_group == group),
        ]


@dataclass(frozen=True)
class CacheUse:
    """Blocks of one group over all partitions: all, held by requests, free but good for a prefix hit."""

    total: int
    used: int
    cached: int


class BlockAllocator:
    """Allocates the blocks of all groups of a request together, or none.

    Free blocks form one least-recently-used queue per group and partition; what a free block holds stays valid until
    it is taken. With prefix caching, requests share the blocks of equal beginnings: full-history blocks as they are,
    ring blocks until the ring comes round, when the slot gets another block.

    Args:
        groups: the cache groups in contract order.
        slots_per_partition: how many requests of maximal length a partition can hold; every group gets
            `slots * blocks_per_request` blocks, so capacity is the same in all of them.
        num_partitions: data-parallel ranks.
        prefix_hasher: makes the keys of shared pages; None switches prefix caching off.
        max_requests_per_partition: a partition with so many requests takes no more for the sake of a prefix hit.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        slots_per_partition: int,
        num_partitions: int,
        prefix_hasher: PageHasher | None = None,
        max_requests_per_partition: int | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.num_partitions = num_partitions
        self.prefix_hasher = prefix_hasher
        self.blocks_per_partition = tuple(slots_per_partition * group.blocks_per_request for group in groups)
        self.requests_per_partition = [0] * num_partitions
        self._max_requests = max_requests_per_partition
        self._next_partition = 0
        self._references = [np.zeros(count * num_partitions, dtype=np.int32) for count in self.blocks_per_partition]
        self._free: list[list[OrderedDict[int, None]]] = [
            [
                OrderedDict.fromkeys(range(partition * count, (partition + 1) * count))
                for partition in range(num_partitions)
            ]
            for count in self.blocks_per_partition
        ]
        self._full = [index for index, group in enumerate(groups) if group.kind is GroupKind.FULL]
        # A window that never reaches across the end of a page (HCA's) leaves nothing to keep.
        self._kept_rings = [
            index for index, group in enumerate(groups) if group.kind is GroupKind.RING and group.name != "hca_state"
        ]
        self._indices = [PrefixIndex(self._full, self._kept_rings) for _ in range(num_partitions)]

    @property
    def num_blocks(self) -> dict[str, int]:
        """Physical blocks per group name, all partitions together."""
        return {
            group.name: count * self.num_partitions
            for group, count in zip(self.groups, self.blocks_per_partition, strict=True)
        }

    def use(self) -> dict[str, CacheUse]:
        """Blocks in use per group name."""
        uses = {}
        for index, (name, total) in enumerate(self.num_blocks.items()):
            free = sum(len(queue) for queue in self._free[index])
            cached = 0
            if self.prefix_hasher is not None:
                cached = sum(
                    self._indices[partition].is_published(index, block)
                    for partition, queue in enumerate(self._free[index])
                    for block in queue
                )
            uses[name] = CacheUse(total, total - free, cached)
        return uses

    def open_table(
        self, num_tokens: int, keys: PageKeys | None = None, max_cached_tokens: int = 0
    ) -> BlockTable | None:
        """A table with blocks for `num_tokens` positions; None when no partition has room.

        The partition with the longest cached beginning wins unless it has its share of requests already; else the
        one with the fewest requests, equally loaded ones in turn.

        Args:
            keys: of the sequence's pages; None looks for no cached beginning.
            max_cached_tokens: most positions to take from the cache.
        """
        for partition, cached in self._hits(keys, max_cached_tokens):
            table = self._open(partition, num_tokens, keys, cached)
            if table is not None:
                return table
        order = sorted(
            range(self.num_partitions),
            key=lambda p: (self.requests_per_partition[p], (p - self._next_partition) % self.num_partitions),
        )
        for partition in order:
            table = self._open(partition, num_tokens, None, 0)
            if table is not None:
                self._next_partition = (partition + 1) % self.num_partitions
                return table
        return None

    def extend(self, table: BlockTable, num_tokens: int) -> bool:
        """Make the table cover `num_tokens` positions. False, and nothing changed, when a group lacks blocks."""
        if num_tokens <= table.num_covered:
            return True
        plans = [self._plan(table, index, num_tokens) for index in range(len(self.groups))]
        free = [len(self._free[index][table.partition]) for index in range(len(self.groups))]
        if any(len(plan.needed) > count for plan, count in zip(plans, free, strict=True)):
            return False
        switches: list[_Switch] = []
        for index, plan in enumerate(plans):
            if plan.num_logical > table.num_logical[index]:
                switches += self._carry_out(table, index, plan)
        # A slot that gets another block keeps its old one until the rows that need the old one are computed.
        table._switches.extend(sorted(switches, key=lambda switch: switch.position))
        table.num_covered = min(
            held * group.tokens_per_block for held, group in zip(table.num_logical, self.groups, strict=True)
        )
        return True

    def commit(self, table: BlockTable, keys: PageKeys, num_computed: int) -> None:
        """Positions below `num_computed` are computed for good: publish their pages, let go of retired ring blocks."""
        if table._switches:
            table.advance(num_computed)
        if self.prefix_hasher is not None and num_computed // PAGE_TOKENS > table.num_published_pages:
            self._publish(table, keys, num_computed // PAGE_TOKENS)
        if table._retired:
            for index, _, block in table._retired:
                self._release(table.partition, index, block)
            table._retired.clear()

    def close_table(self, table: BlockTable) -> None:
        """Give all blocks back; the last pages are the first to be taken for something else."""
        for switch in table._switches:
            self._release(table.partition, switch.group, switch.block)
        for index, _, block in table._retired:
            self._release(table.partition, index, block)
        for index, blocks in enumerate(table.blocks):
            for block in blocks[blocks != NO_BLOCK][::-1].tolist():
                self._release(table.partition, index, block)
            blocks[:] = NO_BLOCK
        table._switches.clear()
        table._retired.clear()
        table.version += 1
        self.requests_per_partition[table.partition] -= 1

    def check(self, group_name: str, holders: Mapping[int, int]) -> None:
        """Assert that the books agree with `holders` (block -> tables that hold it); for tests."""
        index = next(index for index, group in enumerate(self.groups) if group.name == group_name)
        references = self._references[index]
        held = {int(block): int(references[block]) for block in np.flatnonzero(references)}
        assert held == dict(holders), f"{group_name}: references {held}, holders {dict(holders)}"
        free = [block for queue in self._free[index] for block in queue]
        assert len(set(free)) == len(free), f"{group_name}: a block is free twice"
        assert set(free).isdisjoint(held), f"{group_name}: a held block is free"
        assert len(free) + len(held) == len(references), f"{group_name}: blocks are lost"

    def _hits(self, keys: PageKeys | None, max_cached_tokens: int) -> list[tuple[int, int]]:
        """(partition, cached tokens) with a hit, longest first, less loaded first among equals."""
        if keys is None or self.prefix_hasher is None:
            return []
        hits = []
        for partition, index in enumerate(self._indices):
            if self._max_requests is not None and self.requests_per_partition[partition] >= self._max_requests:
                continue
            cached = index.longest(keys, max_cached_tokens)
            if cached:
                hits.append((partition, cached))
        return sorted(hits, key=lambda hit: (-hit[1], self.requests_per_partition[hit[0]]))

    def _open(self, partition: int, num_tokens: int, keys: PageKeys | None, cached: int) -> BlockTable | None:
        table = BlockTable(
            partition,
            [np.full(group.blocks_per_request, NO_BLOCK, dtype=np.int64) for group in self.groups],
            [0] * len(self.groups),
        )
        self.requests_per_partition[partition] += 1
        if keys is not None and cached:
            self._adopt(table, keys, cached)
        if self.extend(table, num_tokens):
            return table
        self.close_table(table)
        return None

    def _adopt(self, table: BlockTable, keys: PageKeys, num_tokens: int) -> None:
        """Hold the cached blocks of the first `num_tokens` positions."""
        index = self._indices[table.partition]
        pages = num_tokens // PAGE_TOKENS
        for page in range(pages):
            found = index.blocks("full", keys.digests[page])
            assert found is not None
            for group, block in zip(self._full, found, strict=True):
                self._hold(table.partition, group, block)
                table.blocks[group][page] = block
        found = index.blocks("boundary", keys.boundaries[pages - 1])
        assert found is not None
        for group, block in zip(self._kept_rings, found, strict=True):
            self._hold(table.partition, group, block)
            last = num_tokens // self.groups[group].tokens_per_block - 1
            table.blocks[group][self.groups[group].table_index(last)] = block
        table.num_logical = [num_tokens // group.tokens_per_block for group in self.groups]
        table.num_cached_tokens = num_tokens
        table.num_published_pages = pages

    def _plan(self, table: BlockTable, index: int, num_tokens: int) -> _Plan:
        """What it takes to give the blocks of a group up to `num_tokens` a place."""
        group = self.groups[index]
        held = table.num_logical[index]
        plan = _Plan(max(held, -(-num_tokens // group.tokens_per_block)))
        if group.kind is GroupKind.FULL:
            plan.needed = list(range(held, plan.num_logical))
            return plan
        ring = group.blocks_per_request
        for logical in range(held, plan.num_logical):
            block = int(table.blocks[index][logical % ring])
            if logical < ring and block == NO_BLOCK:
                plan.needed.append(logical)
            elif logical - held >= ring:
                # The slot was given a block earlier in this very call.
                if self._keeps(index, logical - ring):
                    plan.welcome.append(logical)
            elif block == NO_BLOCK or self._references[index][block] > 1:
                plan.needed.append(logical)
            elif self._keeps(index, logical - ring):
                plan.welcome.append(logical)
        return plan

    def _keeps(self, index: int, logical: int) -> bool:
        """Whether a logical block of a ring lies right before the end of a page, so that a hit could need it."""
        if self.prefix_hasher is None or index not in self._kept_rings:
            return False
        return (logical + 1) * self.groups[index].tokens_per_block % PAGE_TOKENS == 0

    def _carry_out(self, table: BlockTable, index: int, plan: _Plan) -> list[_Switch]:
        group = self.groups[index]
        queue = self._free[index][table.partition]
        spare = len(queue) - len(plan.needed) - self.blocks_per_partition[index] // HISTORY_RESERVE
        welcome = set(plan.welcome[: max(0, spare)])
        switches = []
        for logical in sorted({*plan.needed, *welcome}):
            slot = group.table_index(logical)
            block = self._take(table.partition, index)
            if table.blocks[index][slot] == NO_BLOCK:
                table.blocks[index][slot] = block
                table.version += 1
            else:
                switches.append(_Switch(logical * group.tokens_per_block, index, slot, logical, block))
        for logical in set(plan.welcome) - welcome:
            block = int(table.blocks[index][group.table_index(logical)])
            if block != NO_BLOCK:
                # Overwritten where it lies, so nobody may find it any more.
                self._indices[table.partition].forget(index, block)
        table.num_logical[index] = plan.num_logical
        return switches

    def _publish(self, table: BlockTable, keys: PageKeys, pages: int) -> None:
        index = self._indices[table.partition]
        for page in range(table.num_published_pages, min(pages, len(keys.boundaries))):
            index.publish("full", keys.digests[page], [int(table.blocks[group][page]) for group in self._full])
            kept = [self._block_before(table, group, (page + 1) * PAGE_TOKENS) for group in self._kept_rings]
            if NO_BLOCK not in kept:
                index.publish("boundary", keys.boundaries[page], kept)
            table.num_published_pages = page + 1

    def _block_before(self, table: BlockTable, index: int, position: int) -> int:
        """The ring block that holds the positions before `position`, if it still does."""
        group = self.groups[index]
        logical = position // group.tokens_per_block - 1
        for retired_group, held, block in table._retired:
            if (retired_group, held) == (index, logical):
                return block
        successor = logical + group.blocks_per_request
        current = successor >= table.num_logical[index] or any(
            (switch.group, switch.logical) == (index, successor) for switch in table._switches
        )
        # A successor without a switch overwrites the block where it lies.
        return int(table.blocks[index][group.table_index(logical)]) if current else NO_BLOCK

    def _take(self, partition: int, index: int) -> int:
        block, _ = self._free[index][partition].popitem(last=False)
        self._indices[partition].forget(index, block)
        self._references[index][block] = 1
        return block

    def _hold(self, partition: int, index: int, block: int) -> None:
        if self._references[index][block] == 0:
            del self._free[index][partition][block]
        self._references[index][block] += 1

    def _release(self, partition: int, index: int, block: int) -> None:
        self._references[index][block] -= 1
        if self._references[index][block] == 0:
            queue = self._free[index][partition]
            queue[block] = None
            if not self._indices[partition].is_published(index, block):
                queue.move_to_end(block, last=False)


@dataclass
class _Plan:
    """Logical blocks that must get a block of their own, and those that should if there are enough."""

    num_logical: int
    needed: list[int] = field(default_factory=list)
    welcome: list[int] = field(default_factory=list)
