"""The books of the block allocator under any sequence of calls, and what a cached page promises."""

from __future__ import annotations

import pytest
from dsv4.cache.block_allocator import NO_BLOCK, BlockAllocator, BlockTable
from dsv4.cache.groups import GROUP_NAMES, GroupKind, cache_groups
from dsv4.cache.prefix_index import PageHasher, PageKeys
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

MAX_MODEL_LEN = 640
GROUPS = cache_groups(sliding_window=128, max_model_len=MAX_MODEL_LEN)


class Sequence:
    """A table with the tokens that are computed in it."""

    def __init__(self, table: BlockTable, tokens: list[int]) -> None:
        self.table = table
        self.tokens = tokens
        self.keys = PageKeys()
        self.computed = table.num_cached_tokens
        self.covered = len(tokens)


class AllocatorMachine(RuleBasedStateMachine):
    """Tables are opened, extended, computed and closed; a shadow memory says what each block holds."""

    @initialize(slots=st.integers(1, 3), partitions=st.sampled_from([1, 2]), next_token=st.booleans())
    def start(self, slots: int, partitions: int, next_token: bool) -> None:
        self.hasher = PageHasher(covers_next_token=next_token)
        self.allocator = BlockAllocator(
            GROUPS, slots_per_partition=slots, num_partitions=partitions, prefix_hasher=self.hasher
        )
        self.sequences: list[Sequence] = []
        self.memory: dict[tuple[int, int, int], tuple[int, tuple[int, ...]]] = {}

    @rule(kind=st.integers(0, 2), length=st.integers(1, 500))
    def open(self, kind: int, length: int) -> None:
        tokens = [(kind + 1) * (index % 7) for index in range(length - 1)] + [99]
        keys = PageKeys()
        self.hasher.extend(keys, tokens)
        table = self.allocator.open_table(length, keys, length - 1)
        if table is None:
            return
        assert table.num_cached_tokens % 128 == 0
        assert table.num_cached_tokens < length
        sequence = Sequence(table, tokens)
        self.sequences.append(sequence)
        self.check_readable(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), rows=st.integers(1, 128), more=st.integers(0, 40))
    def compute(self, data: st.DataObject, rows: int, more: int) -> None:
        """Rows in one call of the network, after the table was made long enough for `more` tokens beyond them."""
        sequence = data.draw(st.sampled_from(self.sequences))
        end = min(sequence.computed + rows, MAX_MODEL_LEN)
        while len(sequence.tokens) < min(end + 1, MAX_MODEL_LEN):
            sequence.tokens.append(len(sequence.tokens) % 5)
        if not self.allocator.extend(sequence.table, min(end + more, MAX_MODEL_LEN)):
            return
        sequence.table.advance(end)
        for position in range(sequence.computed, end):
            for index, group in enumerate(GROUPS):
                block = self.block_at(sequence, index, position)
                assert block != NO_BLOCK
                self.memory[index, block, position % group.tokens_per_block] = (
                    position,
                    tuple(sequence.tokens[: position + 1]),
                )
        sequence.computed = end
        self.check_readable(sequence)
        self.hasher.extend(sequence.keys, sequence.tokens)
        self.allocator.commit(sequence.table, sequence.keys, end)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        self.allocator.close_table(sequence.table)

    @invariant()
    def books_are_right(self) -> None:
        for index, group in enumerate(GROUPS):
            if not hasattr(self, "allocator"):
                return
            holders: dict[int, int] = {}
            for sequence in self.sequences:
                held = sequence.table.held_blocks(index)
                assert len(set(held)) == len(held)
                for block in held:
                    holders[block] = holders.get(block, 0) + 1
                    assert block // self.allocator.blocks_per_partition[index] == sequence.table.partition
            self.allocator.check(group.name, holders)

    def teardown(self) -> None:
        if hasattr(self, "allocator"):
            for sequence in self.sequences:
                self.allocator.close_table(sequence.table)
            assert all(use.used == 0 for use in self.allocator.use().values())

    def block_at(self, sequence: Sequence, index: int, position: int) -> int:
        group = GROUPS[index]
        return int(sequence.table.blocks[index][group.table_index(position // group.tokens_per_block)])

    def check_readable(self, sequence: Sequence) -> None:
        """Every position that the next row reads holds this sequence's own beginning."""
        end = sequence.computed
        reach = {"ori": 127, "hca_state": end % 128, "csa_state": end % 4 + 4, "csa_inner_state": end % 4 + 4}
        for index, group in enumerate(GROUPS):
            for position in range(max(0, end - reach.get(group.name, end)), end):
                held = self.memory[index, self.block_at(sequence, index, position), position % group.tokens_per_block]
                assert held == (position, tuple(sequence.tokens[: position + 1])), group.name


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


def allocator(**options: int) -> BlockAllocator:
    return BlockAllocator(GROUPS, **{"slots_per_partition": 2, "num_partitions": 1, **options})


def test_allocation_is_all_or_nothing() -> None:
    books = allocator(slots_per_partition=1)
    first = books.open_table(MAX_MODEL_LEN)
    assert first is not None
    before = books.use()
    assert books.open_table(1) is None
    assert books.use() == before
    books.close_table(first)
    assert books.open_table(MAX_MODEL_LEN) is not None


def test_rings_stop_growing_and_full_groups_do_not() -> None:
    books = allocator()
    table = books.open_table(MAX_MODEL_LEN)
    assert table is not None
    held = {name: len(table.held_blocks(index)) for index, name in enumerate(GROUP_NAMES)}
    assert held == {
        "ori": 4,
        "cmp_c128": 5,
        "cmp_c4": 5,
        "idx": 5,
        "hca_state": 48,
        "csa_state": 65,
        "csa_inner_state": 65,
    }
    assert all(group.blocks_per_request == held[group.name] for group in GROUPS if group.kind is GroupKind.RING)


def test_requests_are_spread_over_partitions() -> None:
    books = allocator(num_partitions=4)
    tables = [books.open_table(10) for _ in range(6)]
    assert books.requests_per_partition == [2, 2, 1, 1]
    assert tables[0] is not None
    books.close_table(tables[0])
    following = books.open_table(10)
    assert following is not None
    assert following.partition == 2


@pytest.mark.parametrize("next_token", [False, True])
def test_keys_depend_on_all_tokens_before(next_token: bool) -> None:
    hasher = PageHasher(covers_next_token=next_token)
    keys = [PageKeys() for _ in range(3)]
    hasher.extend(keys[0], [1] * 256 + [2])
    hasher.extend(keys[1], [1] * 256 + [3])
    hasher.extend(keys[2], [9] + [1] * 255 + [2])
    assert keys[0].digests == keys[1].digests
    assert (keys[0].boundaries[1] == keys[1].boundaries[1]) is not next_token
    assert set(keys[0].digests).isdisjoint(keys[2].digests)
    other_process = PageKeys()
    PageHasher(covers_next_token=next_token).extend(other_process, [1] * 256 + [2])
    assert set(keys[0].digests).isdisjoint(other_process.digests)
