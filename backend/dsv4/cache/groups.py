"""The seven cache groups of DeepSeek V4: what a block holds and how positions map to rows.

Layout of the PyPTO serving engine: one scheduler-visible block of a group owns the page of every layer of its family.
`ring` groups keep a sliding window and re-use a fixed number of blocks per request; `full` groups keep all history.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

BLOCK_SIZE = 128
"""Tokens per block of the `ori`, `cmp_*` and `idx` groups (`--block-size`)."""

MAX_TOKENS_IN_FLIGHT = 256
"""A ring must outlive two steps of 128 tokens, so its length is window + 256 positions, rounded up to blocks."""

MAX_ROWS_PER_SEQUENCE = 128
"""Most rows of one sequence in one model call; longer prefill extents are walked in tiles of this many rows."""

STATE_RATIO_HCA = 128
STATE_RATIO_CSA = 4


class GroupKind(enum.Enum):
    RING = "ring"
    FULL = "full"


@dataclass(frozen=True)
class CacheGroup:
    """One group of cache pages.

    Attributes:
        name: `ori`, `cmp_c128`, `cmp_c4`, `idx`, `hca_state`, `csa_state` or `csa_inner_state`.
        tokens_per_block: positions covered by one block.
        compress_ratio: positions per stored row (1, 4 or 128).
        kind: ring or full history.
        window: positions that must stay readable (0 for full history).
        blocks_per_request: ring length, or the blocks of a request of `max_model_len` tokens.
    """

    name: str
    tokens_per_block: int
    compress_ratio: int
    kind: GroupKind
    window: int
    blocks_per_request: int

    @property
    def rows_per_block(self) -> int:
        """Physical rows of one block in one layer."""
        return self.tokens_per_block // self.compress_ratio

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks a request of `num_tokens` positions occupies."""
        needed = -(-num_tokens // self.tokens_per_block)
        return min(needed, self.blocks_per_request) if self.kind is GroupKind.RING else needed

    def table_index(self, logical_block: int) -> int:
        """Index into the request's block table of a logical block (rings wrap around)."""
        return logical_block % self.blocks_per_request if self.kind is GroupKind.RING else logical_block


GROUP_NAMES = ("ori", "cmp_c128", "cmp_c4", "idx", "hca_state", "csa_state", "csa_inner_state")


def cache_groups(*, sliding_window: int, max_model_len: int) -> tuple[CacheGroup, ...]:
    """The seven groups in contract order for a model with this window and this longest sequence."""
    full_blocks = -(-max_model_len // BLOCK_SIZE)
    ori_ring = -(-(sliding_window - 1 + MAX_TOKENS_IN_FLIGHT) // BLOCK_SIZE) + 1

    def full(name: str, ratio: int) -> CacheGroup:
        return CacheGroup(name, BLOCK_SIZE, ratio, GroupKind.FULL, 0, full_blocks)

    def state(name: str, tokens_per_block: int, window: int) -> CacheGroup:
        ring = (window + MAX_TOKENS_IN_FLIGHT) // tokens_per_block
        return CacheGroup(name, tokens_per_block, 1, GroupKind.RING, window, ring)

    return (
        CacheGroup("ori", BLOCK_SIZE, 1, GroupKind.RING, sliding_window, ori_ring),
        full("cmp_c128", STATE_RATIO_HCA),
        full("cmp_c4", STATE_RATIO_CSA),
        full("idx", STATE_RATIO_CSA),
        state("hca_state", 8, STATE_RATIO_HCA),
        state("csa_state", 4, STATE_RATIO_CSA),
        state("csa_inner_state", 4, STATE_RATIO_CSA),
    )
