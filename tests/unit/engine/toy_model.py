"""A network double whose next token is a pure function of the sequence, read back from the cache pages it was given.

It implements the interface of the network over the same block tables: each row writes its token at its position into
every group, and the streams of a row are a hash of all tokens up to it *as found in the pages*. An engine that gets
blocks, positions, replay, sharing or speculation wrong fails an assertion or changes tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from dsv4.cache.groups import MAX_ROWS_PER_SEQUENCE, CacheGroup, GroupKind
from dsv4.model.batch import ForwardBatch

VOCABULARY = 23
MODULUS = 1_000_003
BASE = 31
WINDOW = 128
POWERS = np.ones(2048, dtype=np.int64)
for _exponent in range(1, 2048):
    POWERS[_exponent] = POWERS[_exponent - 1] * BASE % MODULUS

Integers = npt.NDArray[np.int64]


def fold(state: int, token: int) -> int:
    return (state * BASE + token + 7) % MODULUS


def hash_of(tokens: Sequence[int] | Integers) -> int:
    values = np.asarray(tokens, dtype=np.int64) + 7
    count = len(values)
    return int((POWERS[count] + (values * POWERS[count - 1 :: -1][:count]).sum()) % MODULUS) if count else 1


def next_token(tokens: Sequence[int]) -> int:
    """The oracle: what greedy decoding appends to a sequence."""
    return hash_of(tokens) % VOCABULARY


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class ToyPools:
    """(token, position) of each position in every group: rings forget as real ones do."""

    def __init__(self, groups: Sequence[CacheGroup], num_blocks: dict[str, int]) -> None:
        self.groups = {group.name: group for group in groups}
        self.pages = {
            group.name: np.full((num_blocks[group.name], group.tokens_per_block, 2), -1, dtype=np.int64)
            for group in groups
        }
        self.mtp_page = np.full((num_blocks["ori"], 128, 3), -1, dtype=np.int64)


class ToyModel:
    """Drafts at positions p with p % 10 < 10 * `agreement` are right."""

    def __init__(self, agreement: float = 0.7) -> None:
        self.device = torch.device("cpu")
        self._right = round(agreement * 10)
        self.rows = 0

    def forward(self, batch: ForwardBatch, pools: ToyPools) -> torch.Tensor:
        """Streams [rows, 1, 2]: hash of the sequence up to the row, and its position."""
        self.rows += batch.num_rows
        tokens, positions, sequences = _columns(batch)
        tables = {name: table.numpy() for name, table in batch.block_tables.items()}
        for name, group in pools.groups.items():
            blocks, offsets = _slots(group, tables[name][sequences], positions)
            assert (blocks >= 0).all(), f"{name}: a position has no block"
            pools.pages[name][blocks, offsets] = np.stack([tokens, positions], axis=1)
        states = [_history(pools, tables, int(s), int(p)) for s, p in zip(sequences, positions, strict=True)]
        return torch.from_numpy(np.stack([np.array(states), positions], axis=1)[:, None]).double()

    def logits(self, bundle: torch.Tensor) -> torch.Tensor:
        return _one_hot(bundle[:, 0, 0].long() % VOCABULARY)

    def forward_mtp(self, previous: torch.Tensor, batch: ForwardBatch, pools: ToyPools) -> torch.Tensor:
        """Streams [rows, 1, 2]: hash up to position + 1. The rows that a row sees must form one chain of tokens."""
        tokens, positions, sequences = _columns(batch)
        table, group = batch.block_tables["ori"].numpy(), pools.groups["ori"]
        states = previous[:, 0, 0].long().numpy()
        blocks, offsets = _slots(group, table[sequences], positions)
        assert (blocks >= 0).all(), "prediction layer: a position has no block"
        pools.mtp_page[blocks, offsets] = np.stack([states, positions, tokens], axis=1)
        for sequence, position in zip(sequences.tolist(), positions.tolist(), strict=True):
            visible = np.arange(max(0, position - WINDOW + 1), position + 1)
            rows = pools.mtp_page[_slots(group, table[sequence][None], visible)]
            assert (rows[:, 1] == visible).all(), f"prediction layer: row {position} sees positions {rows[:, 1]}"
            follows = (rows[:-1, 0] * BASE + rows[:-1, 2] + 7) % MODULUS
            assert (follows == rows[1:, 0]).all(), f"prediction layer: row {position} sees rows of a rejected draft"
        following = (states * BASE + tokens + 7) % MODULUS
        return torch.from_numpy(np.stack([following, positions], axis=1)[:, None]).double()

    def mtp_logits(self, bundle: torch.Tensor) -> torch.Tensor:
        right = bundle[:, 0, 1].long() % 10 < self._right
        return _one_hot((bundle[:, 0, 0].long() + torch.where(right, 0, 1)) % VOCABULARY)


def _columns(batch: ForwardBatch) -> tuple[Integers, Integers, Integers]:
    """Tokens, positions, sequences, after the network's own conditions on a call were checked."""
    positions, sequences = batch.positions.numpy(), batch.sequence_index.numpy()
    for sequence in np.unique(sequences):
        span = positions[sequences == sequence]
        assert len(span) <= MAX_ROWS_PER_SEQUENCE
        assert (np.diff(span) == 1).all()
    return batch.token_ids.numpy(), positions, sequences


def _slots(group: CacheGroup, tables: Integers, positions: Integers) -> tuple[Integers, Integers]:
    logical = positions // group.tokens_per_block
    index = logical % group.blocks_per_request if group.kind is GroupKind.RING else logical
    return tables[np.arange(len(positions)) % len(tables), index], positions % group.tokens_per_block


def _history(pools: ToyPools, tables: dict[str, Integers], sequence: int, position: int) -> int:
    """Hash of tokens 0..position from a full-history group; what a ring must still hold has to agree."""
    positions = np.arange(position + 1)
    tokens = _read(pools, tables, "cmp_c4", sequence, positions)
    # HCA closes windows of 128 positions, CSA of 4 and reads the window before as well.
    since_window, since_four = position % 128 + 1, position % 4 + 5
    for name, reach in (("cmp_c128", position + 1), ("idx", position + 1), ("ori", 128), ("hca_state", since_window),
                        ("csa_state", since_four), ("csa_inner_state", since_four)):  # fmt: skip
        visible = positions[-reach:]
        assert (_read(pools, tables, name, sequence, visible) == tokens[visible]).all(), name
    return hash_of(tokens)


def _read(pools: ToyPools, tables: dict[str, Integers], name: str, sequence: int, positions: Integers) -> Integers:
    rows = pools.pages[name][_slots(pools.groups[name], tables[name][sequence][None], positions)]
    assert (rows[:, 1] == positions).all(), f"{name}: positions {positions} hold {rows[:, 1]}"
    return rows[:, 0]


def _one_hot(tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(tokens, VOCABULARY).float()
