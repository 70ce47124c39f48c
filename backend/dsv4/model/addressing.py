"""Where the rows of one call read and write, computed once and shared by all layers.

Everything follows from positions and block tables: a row at position t writes its own slots, sees window positions
`t - window + 1 .. t` and entries `j < (t + 1) // ratio`, and nothing else.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from dsv4.cache.groups import CacheGroup, GroupKind
from dsv4.config.model_config import CSA_RATIO, HCA_RATIO, ModelConfig
from dsv4.model.batch import ForwardBatch
from dsv4.model.cache_pools import CachePools
from dsv4.model.rope import RotaryTable, Rotation

KEY_STEP = 16
"""Key extents are padded to multiples of this, so that few different shapes occur."""


def round_up(keys: int) -> int:
    """Padded extent of a number of keys."""
    return -(-keys // KEY_STEP) * KEY_STEP


@dataclass(frozen=True)
class KeySlots:
    """Rows of a pool that each row of the call may attend to.

    Attributes:
        slots: [rows, keys] int64 pool rows; absent keys point to the pool's zero row.
        valid: [rows, keys] bool.
        absent_row: index of that zero row.
    """

    slots: torch.Tensor
    valid: torch.Tensor
    absent_row: int

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        """[rows, 1, keys] FP32: 0 where valid, minus infinity elsewhere."""
        zero = torch.zeros((), device=self.valid.device)
        return torch.where(self.valid, zero, float("-inf"))[:, None]


@dataclass(frozen=True)
class CompressionSlots:
    """Addresses of a compressor of one ratio.

    Attributes:
        phase: [rows] int64, position modulo ratio: the row of the position bias.
        state_write: state group name -> [rows] pool rows.
        num_closing: rows that close a window in this call; when 0 the tensors below are not there.
        state_read: state group name -> [closing, source rows] pool rows of the windows, oldest first.
        state_missing: [closing, source rows] bool, rows before the start of the sequence.
        entry_write: entry group name -> [closing] pool rows.
        rotation: factors at the window starts.
        entries: entry group name -> visible entries of each row in order, padded; empty when no row
            sees any.
        most_visible: entries that the row which sees most sees.
    """

    phase: torch.Tensor
    state_write: dict[str, torch.Tensor]
    num_closing: int
    state_read: dict[str, torch.Tensor]
    state_missing: torch.Tensor | None
    entry_write: dict[str, torch.Tensor]
    rotation: Rotation | None
    entries: dict[str, KeySlots]
    most_visible: int


@dataclass(frozen=True)
class CallAddresses:
    """All addresses of one call.

    Attributes:
        window_write: [rows] `ori` pool rows.
        window: sliding-window keys, oldest first.
        compression: ratio -> addresses, for the ratios that the called layers use.
        rotations: compress ratio of a layer -> factors at the rows' positions.
    """

    window_write: torch.Tensor
    window: KeySlots
    compression: dict[int, CompressionSlots]
    rotations: dict[int, Rotation]


_STATE_GROUPS = {CSA_RATIO: ("csa_state", "csa_inner_state"), HCA_RATIO: ("hca_state",)}
_ENTRY_GROUPS = {CSA_RATIO: ("cmp_c4", "idx"), HCA_RATIO: ("cmp_c128",)}


class AddressBuilder:
    """Computes `CallAddresses` for one set of layers.

    Args:
        ratios: compress ratios of the layers that will be run.
    """

    def __init__(self, config: ModelConfig, ratios: set[int], main: RotaryTable, compress: RotaryTable) -> None:
        self._config = config
        self._ratios = sorted(ratios)
        self._tables = {ratio: compress if ratio else main for ratio in ratios}
        self._compress = compress

    def build(self, batch: ForwardBatch, pools: CachePools) -> CallAddresses:
        """Raises ValueError when a row's write slot lies in a block that is not allocated."""
        reader = _TableReader(batch, pools)
        window_write = reader.slots_at("ori", batch.positions)
        compression = {ratio: self._compression(ratio, batch, reader) for ratio in self._ratios if ratio}
        tables = {table: table.at(batch.positions) for table in set(self._tables.values())}
        addresses = CallAddresses(
            window_write=window_write,
            window=self._window(batch, reader),
            compression=compression,
            rotations={ratio: tables[table] for ratio, table in self._tables.items()},
        )
        _check_writes(addresses)
        return addresses

    def _window(self, batch: ForwardBatch, reader: _TableReader) -> KeySlots:
        window = self._config.sliding_window
        padded = round_up(window)
        age = torch.arange(window - 1, window - 1 - padded, -1, device=batch.positions.device)
        positions = batch.positions[:, None] - age
        valid = (positions >= 0) & (age >= 0)
        return reader.keys("ori", positions, valid)

    def _compression(self, ratio: int, batch: ForwardBatch, reader: _TableReader) -> CompressionSlots:
        positions = batch.positions
        state_groups, entry_groups = _STATE_GROUPS[ratio], _ENTRY_GROUPS[ratio]
        closing = torch.nonzero((positions + 1) % ratio == 0).flatten()
        state_read: dict[str, torch.Tensor] = {}
        entry_write: dict[str, torch.Tensor] = {}
        missing = rotation = None
        num_closing = closing.shape[0]
        most_visible = (int(positions.max()) + 1) // ratio
        if num_closing:
            closing_positions = positions[closing]
            # CSA pools the previous window's first halves and the own window's second halves.
            depth = 2 * ratio if ratio == CSA_RATIO else ratio
            sources = closing_positions[:, None] - torch.arange(depth - 1, -1, -1, device=positions.device)
            missing = sources < 0
            rows = closing[:, None].expand_as(sources)
            state_read = {name: reader.keys(name, sources, ~missing, rows=rows).slots for name in state_groups}
            entry_write = {name: reader.slots_at(name, closing_positions, rows=closing) for name in entry_groups}
            rotation = self._compress.at(closing_positions + 1 - ratio)
        return CompressionSlots(
            phase=positions % ratio,
            state_write={name: reader.slots_at(name, positions) for name in state_groups},
            num_closing=num_closing,
            state_read=state_read,
            state_missing=missing,
            entry_write=entry_write,
            rotation=rotation,
            entries=self._entries(ratio, positions, most_visible, reader),
            most_visible=most_visible,
        )

    @staticmethod
    def _entries(ratio: int, positions: torch.Tensor, most_visible: int, reader: _TableReader) -> dict[str, KeySlots]:
        if most_visible == 0:
            return {}
        padded = round_up(most_visible)
        numbers = torch.arange(padded, device=positions.device)
        valid = numbers < (positions[:, None] + 1) // ratio
        # An entry lies where its window's last position is written.
        last_positions = (numbers * ratio + ratio - 1).expand_as(valid)
        return {name: reader.keys(name, last_positions, valid) for name in _ENTRY_GROUPS[ratio]}


class _TableReader:
    """Turns positions into pool rows through the block tables of one batch."""

    def __init__(self, batch: ForwardBatch, pools: CachePools) -> None:
        self._batch = batch
        self._pools = pools

    def slots_at(self, name: str, positions: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Pool rows of positions of any shape whose first axis are the batch's rows, or `rows` of the same shape.

        Negative where the block is not allocated.
        """
        group = self._pools.groups[name]
        table = self._batch.block_tables[name]
        sequences = self._batch.sequence_index
        if rows is not None:
            sequences = sequences[rows]
        elif positions.dim() == 2:
            sequences = sequences[:, None]
        logical = torch.div(positions, group.tokens_per_block, rounding_mode="floor")
        blocks = table[sequences, self._table_index(group, logical, table.shape[1])]
        offset = positions % group.tokens_per_block
        if group.compress_ratio > 1:
            offset = offset // group.compress_ratio
        return blocks * group.rows_per_block + offset

    def keys(
        self, name: str, positions: torch.Tensor, valid: torch.Tensor, rows: torch.Tensor | None = None
    ) -> KeySlots:
        """Like `slots_at`, with the zero row where not valid."""
        absent = self._pools.absent_row(name)
        return KeySlots(torch.where(valid, self.slots_at(name, positions, rows), absent), valid, absent)

    @staticmethod
    def _table_index(group: CacheGroup, logical: torch.Tensor, table_length: int) -> torch.Tensor:
        if group.kind is GroupKind.RING:
            return logical % group.blocks_per_request
        # Padding columns may lie beyond the table; they are masked.
        return logical.clamp(max=table_length - 1)


def _check_writes(addresses: CallAddresses) -> None:
    writes = [("ori", addresses.window_write)]
    for slots in addresses.compression.values():
        writes.extend(slots.state_write.items())
        writes.extend(slots.entry_write.items())
    if int(torch.cat([rows for _, rows in writes]).min()) < 0:
        names = [name for name, rows in writes if int(rows.min()) < 0]
        raise ValueError(f"a row's position has no block in group {', '.join(names)}")
