"""Blocks of the grouped cache: who owns which, per partition. Pure bookkeeping, no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsv4.cache.groups import CacheGroup

NO_BLOCK = -1


class _GroupPool:
    """Free blocks of one group: one first-in first-out queue a partition, so that old pages stay longest."""

    def __init__(self, blocks_per_partition: int, num_partitions: int) -> None:
        self.free = [
            deque(range(partition * blocks_per_partition, (partition + 1) * blocks_per_partition))
            for partition in range(num_partitions)
        ]
        self.references = np.zeros(blocks_per_partition * num_partitions, dtype=np.int32)


@dataclass
class BlockTable:
    """The blocks of one request in every group.

    Attributes:
        partition: the rank that holds the request's cache, fixed until the request leaves.
        blocks: one array [blocks_per_request] int64 a group, physical block ids, NO_BLOCK where none is held.
        num_blocks: blocks held per group, always a prefix of the array.
        version: grows with every change, so that a copy elsewhere knows when it is stale.
    """

    partition: int
    blocks: list[npt.NDArray[np.int64]]
    num_blocks: list[int]
    version: int = 0


@dataclass(frozen=True)
class CacheUse:
    """Blocks of one group over all partitions."""

    total: int
    used: int


class BlockAllocator:
    """Allocates the blocks of all groups of a request together, or none.

    Args:
        groups: the cache groups in contract order.
        slots_per_partition: how many requests of maximal length a partition can hold; every group gets
            `slots * blocks_per_request` blocks, so capacity is the same in all of them.
        num_partitions: data-parallel ranks.
    """

    def __init__(self, groups: Sequence[CacheGroup], *, slots_per_partition: int, num_partitions: int) -> None:
        self.groups = tuple(groups)
        self.num_partitions = num_partitions
        self.blocks_per_partition = tuple(slots_per_partition * group.blocks_per_request for group in groups)
        self._pools = [_GroupPool(count, num_partitions) for count in self.blocks_per_partition]
        self.requests_per_partition = [0] * num_partitions
        self._next_partition = 0

    @property
    def num_blocks(self) -> dict[str, int]:
        """Physical blocks per group name, all partitions together."""
        return {
            group.name: count * self.num_partitions
            for group, count in zip(self.groups, self.blocks_per_partition, strict=True)
        }

    def use(self) -> dict[str, CacheUse]:
        """Blocks in use per group name."""
        totals = self.num_blocks
        return {
            group.name: CacheUse(totals[group.name], totals[group.name] - sum(len(queue) for queue in pool.free))
            for group, pool in zip(self.groups, self._pools, strict=True)
        }

    def open_table(self, num_tokens: int) -> BlockTable | None:
        """A table with blocks for `num_tokens` in the partition with the fewest requests; None when none has room.

        Partitions with equally many requests take turns.
        """
        order = sorted(
            range(self.num_partitions),
            key=lambda p: (self.requests_per_partition[p], (p - self._next_partition) % self.num_partitions),
        )
        for partition in order:
            table = BlockTable(
                partition,
                [np.full(group.blocks_per_request, NO_BLOCK, dtype=np.int64) for group in self.groups],
                [0] * len(self.groups),
            )
            if self.extend(table, num_tokens):
                self.requests_per_partition[partition] += 1
                self._next_partition = (partition + 1) % self.num_partitions
                return table
        return None

    def extend(self, table: BlockTable, num_tokens: int) -> bool:
        """Make the table cover `num_tokens` positions. False, and nothing changed, when a group lacks blocks."""
        wanted = [
            max(0, group.blocks_for(num_tokens) - held)
            for group, held in zip(self.groups, table.num_blocks, strict=True)
        ]
        if not any(wanted):
            return True
        if any(len(pool.free[table.partition]) < count for pool, count in zip(self._pools, wanted, strict=True)):
            return False
        for index, count in enumerate(wanted):
            if count:
                self._take(table, index, count)
        table.version += 1
        return True

    def close_table(self, table: BlockTable) -> None:
        """Give all blocks back."""
        for index, pool in enumerate(self._pools):
            held = table.blocks[index][: table.num_blocks[index]]
            for block in held.tolist():
                pool.references[block] -= 1
                if pool.references[block] == 0:
                    pool.free[table.partition].append(block)
            held[:] = NO_BLOCK
            table.num_blocks[index] = 0
        table.version += 1
        self.requests_per_partition[table.partition] -= 1

    def _take(self, table: BlockTable, index: int, count: int) -> None:
        pool = self._pools[index]
        queue = pool.free[table.partition]
        held = table.num_blocks[index]
        for position in range(held, held + count):
            block = queue.popleft()
            pool.references[block] += 1
            table.blocks[index][position] = block
        table.num_blocks[index] = held + count
