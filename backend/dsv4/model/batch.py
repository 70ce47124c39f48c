"""What one call of the network gets: rows with positions, and where their caches are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ForwardBatch:
    """Rows of any number of sequences; the network knows nothing else about requests.

    Positions of one sequence are consecutive and ascending within a call, and a sequence has at most
    `dsv4.cache.groups.MAX_ROWS_PER_SEQUENCE` rows. Every row writes its caches before any row reads, and a row never
    sees a position above its own.

    Attributes:
        token_ids: [rows] int64. For the MTP block: the token at position + 1.
        positions: [rows] int64, absolute.
        sequence_index: [rows] int64, the row of the block tables that belongs to this row's sequence.
        block_tables: group name -> [num_sequences, table_length] int64, ids of physical blocks in the pools, -1 where
            nothing is allocated. Position t of a ring group is found at
            `table[(t // tokens_per_block) % ring_length]`, of a full group at `table[t // tokens_per_block]`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    sequence_index: torch.Tensor
    block_tables: Mapping[str, torch.Tensor]

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]
