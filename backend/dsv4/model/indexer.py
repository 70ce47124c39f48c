"""Lightning indexer: which compressed entries a row of a ratio-4 layer attends to.

In W8A8 queries and keys are rotated by a Hadamard matrix, so that their INT8 rounding is even, and multiplied exactly;
the rotation cancels in the product.
"""

from __future__ import annotations

import torch

from dsv4.checkpoint.weights import ModelWeights
from dsv4.config.model_config import CSA_RATIO, ModelConfig
from dsv4.errors import ConfigurationError
from dsv4.model.addressing import CompressionSlots, KeySlots, round_up
from dsv4.model.compressor import Compressor
from dsv4.model.int8_linear import Int8Linear
from dsv4.model.ops import gather_rows, hadamard_matrix, linear, quantize_rows, round_bf16
from dsv4.model.rope import Rotation

MAX_SCORE_ELEMENTS = 1 << 24
"""Rows are scored in slices of at most this many [row, head, entry] products, which bounds the memory of a call."""


class Indexer:
    """The indexer of one layer.

    Args:
        prefix: tensor name prefix ending in `indexer.`.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, prefix: str, device: torch.device) -> None:
        self._heads = config.index_n_heads
        self._dim = config.index_head_dim
        self._topk = config.index_topk
        self._int8 = weights.numerics == "w8a8"
        self.compressor = Compressor(
            config,
            weights,
            f"{prefix}compressor.",
            ratio=CSA_RATIO,
            width=self._dim,
            state_group="csa_inner_state",
            device=device,
        )
        self.head_projection = weights.matrix(f"{prefix}weights_proj.weight")
        """[index heads, hidden]."""
        self._head_scale = self._dim**-0.5 * self._heads**-0.5
        if self._int8:
            self._query = Int8Linear(*weights.quantized(f"{prefix}wq_b.weight"), device)
            try:
                self._hadamard = hadamard_matrix(self._dim, device=device)
            except ValueError as error:
                raise ConfigurationError(f"index_head_dim is {self._dim}: {error}") from error
        else:
            self._query_weight = weights.matrix(f"{prefix}wq_b.weight").to(device)

    def write_keys(self, slots: CompressionSlots, state: torch.Tensor, keys: tuple[torch.Tensor, ...]) -> None:
        """Store the keys of the windows that this call completes.

        Args:
            state: pool of the indexer compressor's state rows.
            keys: pools of the `idx` group: INT8 keys and FP32 scales, or FP32 keys.
        """
        entries = self.compressor.close_windows(slots, state)
        write = slots.entry_write["idx"]
        if not self._int8:
            keys[0].index_copy_(0, write, entries)
            return
        rotated = round_bf16(linear(round_bf16(entries), self._hadamard))
        values, scales = quantize_rows(rotated)
        keys[0].index_copy_(0, write, values.to(torch.int8))
        keys[1].index_copy_(0, write, scales)

    def select(
        self,
        query_latent: tuple[torch.Tensor, torch.Tensor | None],
        head_weights: torch.Tensor,
        rotation: Rotation,
        slots: CompressionSlots,
        keys: tuple[torch.Tensor, ...],
    ) -> KeySlots | None:
        """The `cmp_c4` rows each row attends to, in ascending order of the entries.

        Args:
            query_latent: normed query latent [rows, q_lora_rank] with its row scale [rows, 1] when it is INT8.
            head_weights: [rows, index heads] FP32, the normed input times `head_projection`.
            rotation: factors at the rows' positions.

        Returns:
            None when no row sees an entry.
        """
        if not slots.entries:
            return None
        entries, index_keys = slots.entries["cmp_c4"], slots.entries["idx"]
        if slots.most_visible <= self._topk:
            return entries  # every visible entry is selected
        queries, query_scales = self._queries(query_latent, rotation)
        head_weights = head_weights * self._head_scale
        scores = self._scores(queries, query_scales, head_weights, index_keys, keys)
        selected, present = select_highest(scores, entries.valid, self._topk)
        picked = torch.where(present, entries.slots.gather(1, selected), entries.absent_row)
        return KeySlots(picked, present, entries.absent_row)

    def _queries(
        self, query_latent: tuple[torch.Tensor, torch.Tensor | None], rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Index queries [rows, heads, dim] and, in INT8, their scales [rows, heads, 1]."""
        latent, latent_scale = query_latent
        if latent_scale is None:
            queries = linear(latent, self._query_weight).unflatten(1, (self._heads, self._dim))
            return rotation.apply(queries), None
        queries = self._query(latent, latent_scale).unflatten(1, (self._heads, self._dim))
        queries = round_bf16(rotation.apply(queries))
        rotated = linear(queries.flatten(0, 1), self._hadamard).unflatten(0, (-1, self._heads))
        return quantize_rows(rotated)

    def _scores(
        self,
        queries: torch.Tensor,
        query_scales: torch.Tensor | None,
        head_weights: torch.Tensor,
        index_keys: KeySlots,
        keys: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """`sum_h weight_h * relu(q_h . key)`: [rows, entries] FP32. Columns that are not valid hold zero or less."""
        num_rows, num_entries = index_keys.slots.shape
        step = max(1, MAX_SCORE_ELEMENTS // (self._heads * num_entries))
        parts = []
        for begin in range(0, num_rows, step):
            rows = slice(begin, begin + step)
            slots = index_keys.slots[rows]
            gathered = gather_rows(keys[0], slots).float()
            # Integer products up to index_head_dim * 127 * 127 are exact in FP32.
            products = torch.bmm(queries[rows], gathered.transpose(1, 2))
            if query_scales is not None:
                key_scales = gather_rows(keys[1], slots).transpose(1, 2)
                products.mul_(query_scales[rows]).mul_(key_scales)
            parts.append(products.relu_().mul_(head_weights[rows, :, None]).sum(dim=1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def select_highest(scores: torch.Tensor, valid: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` valid columns of highest score in each row, equal scores by lowest column, in ascending order.

    Args:
        scores: [rows, columns] FP32, free of NaN where valid; more columns than `count`.
        valid: [rows, columns] bool.

    Returns:
        columns [rows, padded] int64 and which of them are present [rows, padded].
    """
    rows, columns = scores.shape
    scores = scores.masked_fill(~valid, float("-inf"))
    threshold = scores.topk(count, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above = scores > threshold
    equal = (scores == threshold) & valid
    missing = count - above.sum(dim=1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=1) <= missing))
    rank = chosen.cumsum(dim=1)
    padded = round_up(count)
    # Columns that are not chosen all land in one extra place, which is cut off.
    place = torch.where(chosen, rank - 1, padded)
    selected = scores.new_zeros(rows, padded + 1, dtype=torch.int64)
    selected.scatter_(1, place, torch.arange(columns, device=scores.device).expand(rows, columns))
    present = torch.arange(padded, device=scores.device) < rank[:, -1:]
    return selected[:, :padded], present
