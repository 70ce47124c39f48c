"""Gated pooling of token windows into cache entries.

Each token leaves a row [key/value, gate] in a state cache. When a window of `ratio` positions is complete its rows are
pooled, channel by channel, with a softmax over the gates. With ratio 4 windows overlap: the first half of a token's
channels goes to the next entry, the second half to its own.
"""

from __future__ import annotations

import torch

from dsv4.checkpoint.weights import ModelWeights
from dsv4.config.model_config import CSA_RATIO, ModelConfig
from dsv4.model.addressing import CompressionSlots
from dsv4.model.ops import gather_rows, rms_norm


class Compressor:
    """One compressor: the main one of a layer or the indexer's.

    Args:
        prefix: tensor name prefix ending in `compressor.`.
        width: width of an entry.
        state_group: cache group of its state rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        prefix: str,
        *,
        ratio: int,
        width: int,
        state_group: str,
        device: torch.device,
    ) -> None:
        self._overlap = ratio == CSA_RATIO
        self._ratio = ratio
        self._width = width
        self._epsilon = config.rms_norm_eps
        self.state_group = state_group
        self.projection = torch.cat((weights.matrix(f"{prefix}wkv.weight"), weights.matrix(f"{prefix}wgate.weight")))
        """[2 * state width, hidden]: key/value rows, then gate rows."""
        bias = weights.vector(f"{prefix}ape").to(device)
        self._state_bias = torch.cat((torch.zeros_like(bias), bias), dim=1)
        self._norm = weights.vector(f"{prefix}norm.weight").to(device)

    @property
    def state_width(self) -> int:
        """Columns of a state row."""
        return self._state_bias.shape[1]

    def write_state(self, projected: torch.Tensor, slots: CompressionSlots, state: torch.Tensor) -> None:
        """Store the rows of this call.

        Args:
            projected: [rows, state_width] FP32, the normed input times `projection`.
            state: pool [.., state_width] FP32.
        """
        rows = projected + self._state_bias.index_select(0, slots.phase)
        state.index_copy_(0, slots.state_write[self.state_group], rows)

    def close_windows(self, slots: CompressionSlots, state: torch.Tensor) -> torch.Tensor:
        """Entries of the windows that this call completes: [closing, width] FP32, normed and rotated."""
        assert slots.state_missing is not None
        assert slots.rotation is not None
        read = slots.state_read[self.state_group]
        rows = gather_rows(state, read)
        values, gates = rows.chunk(2, dim=-1)
        if self._overlap:
            values, gates = self._overlapping(values), self._overlapping(gates)
        gates = gates.masked_fill(slots.state_missing[:, :, None], float("-inf"))
        entry = (gates.softmax(dim=1) * values).sum(dim=1)
        return slots.rotation.apply(rms_norm(entry, self._norm, self._epsilon))

    def _overlapping(self, rows: torch.Tensor) -> torch.Tensor:
        """First halves of the previous window and second halves of the own one: [closing, 2 * ratio, width]."""
        previous, own = rows[:, : self._ratio, : self._width], rows[:, self._ratio :, self._width :]
        return torch.cat((previous, own), dim=1)
