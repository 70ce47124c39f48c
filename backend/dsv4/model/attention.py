"""Attention of one layer: shared key/value vector, sliding window, compressed entries, attention sinks.

One vector per position is key and value of all heads. A row attends to the last `sliding_window` positions and, in
compressed layers, to entries: all visible ones (ratio 128) or those the indexer picks (ratio 4).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsv4.checkpoint.weights import ModelWeights
from dsv4.config.model_config import CSA_RATIO, ModelConfig
from dsv4.model.addressing import CallAddresses, KeySlots
from dsv4.model.compressor import Compressor
from dsv4.model.indexer import Indexer
from dsv4.model.int8_linear import Int8Linear
from dsv4.model.ops import batched_linear, gather_rows, inverse_rms, linear, quantize_rows, rms_norm, round_bf16

KEY_TILE = 128
"""Keys whose weights are summed together; tiles follow each other in order."""

MAX_KEY_ELEMENTS = 1 << 24
"""Rows attend in slices of at most this many gathered key elements, which bounds the memory of a call."""


class LayerPages:
    """Pools of one layer: `window` always, the others where the layer's ratio has them."""

    def __init__(
        self,
        window: torch.Tensor,
        *,
        entries: torch.Tensor | None = None,
        state: torch.Tensor | None = None,
        inner_state: torch.Tensor | None = None,
        index_keys: tuple[torch.Tensor, ...] = (),
    ) -> None:
        self.window = window
        self.entries = entries
        self.state = state
        self.inner_state = inner_state
        self.index_keys = index_keys


class Attention:
    """Attention half of a block.

    Args:
        prefix: tensor name prefix ending in `attn.`.
        ratio: compress ratio of the layer: 0, 4 or 128.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, prefix: str, *, ratio: int, device: torch.device
    ) -> None:
        self._config = config
        self._ratio = ratio
        self._int8 = weights.numerics == "w8a8"
        self._epsilon = config.rms_norm_eps
        self._scale = config.head_dim**-0.5
        self._query_norm = weights.vector(f"{prefix}q_norm.weight").to(device)
        self._key_norm = weights.vector(f"{prefix}kv_norm.weight").to(device)
        self._sink = weights.vector(f"{prefix}attn_sink").to(device)

        projections = [weights.matrix(f"{prefix}wq_a.weight"), weights.matrix(f"{prefix}wkv.weight")]
        self._compressor: Compressor | None = None
        self._indexer: Indexer | None = None
        if ratio:
            self._compressor = Compressor(
                config,
                weights,
                f"{prefix}compressor.",
                ratio=ratio,
                width=config.head_dim,
                state_group="csa_state" if ratio == CSA_RATIO else "hca_state",
                device=device,
            )
            projections.append(self._compressor.projection)
        if ratio == CSA_RATIO:
            self._indexer = Indexer(config, weights, f"{prefix}indexer.", device)
            projections += [self._indexer.compressor.projection, self._indexer.head_projection]
        # Everything that reads the normed input, as one product.
        self._input_projection = torch.cat(projections).to(device)
        self._input_widths = [projection.shape[0] for projection in projections]

        groups, rank = config.o_groups, config.o_lora_rank
        self._output_down = weights.matrix(f"{prefix}wo_a.weight").unflatten(0, (groups, rank)).to(device)
        if self._int8:
            self._query = Int8Linear(*weights.quantized(f"{prefix}wq_b.weight"), device)
            values, self._output_scale = weights.quantized(f"{prefix}wo_b.weight")
            self._output_scale = self._output_scale.to(device)
            unit = torch.ones(config.hidden_size, device=device)
            self._output_up = [Int8Linear(part.contiguous(), unit, device) for part in values.chunk(groups, dim=1)]
        else:
            self._query_weight = weights.matrix(f"{prefix}wq_b.weight").to(device)
            self._output_weight = weights.matrix(f"{prefix}wo_b.weight").to(device)

    def __call__(self, x: torch.Tensor, addresses: CallAddresses, pages: LayerPages) -> torch.Tensor:
        """x [rows, hidden] FP32, the normed input -> [rows, hidden] FP32. Writes this layer's caches, then reads."""
        latent, key, *compressed = linear(x, self._input_projection).split(self._input_widths, dim=1)
        rotation = addresses.rotations[self._ratio]
        query_latent = self._query_latent(latent)
        query = self._queries(query_latent)
        query = self._rounded(rotation.apply(query))
        key = rotation.apply(rms_norm(key, self._key_norm, self._epsilon))
        pages.window.index_copy_(0, addresses.window_write, key.to(pages.window.dtype))
        key_sources = [(pages.window, addresses.window)]
        entries = self._compress(compressed, query_latent, addresses, pages)
        if entries is not None:
            assert pages.entries is not None
            key_sources.append((pages.entries, entries))
        output = self._attend(query, key_sources)
        output = self._rounded(rotation.apply_inverse(output))
        return self._project_output(output)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return round_bf16(x) if self._int8 else x

    def _query_latent(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Normed query latent [rows, q_lora_rank]; in W8A8 quantised straight from FP32, with its row scale."""
        normed = rms_norm(latent, self._query_norm, self._epsilon)
        return quantize_rows(normed) if self._int8 else (normed, None)

    def _queries(self, query_latent: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
        """Queries [rows, heads, head_dim] FP32, each head divided by its own RMS."""
        latent, scale = query_latent
        query = linear(latent, self._query_weight) if scale is None else self._query(latent, scale)
        query = query.unflatten(1, (self._config.num_attention_heads, self._config.head_dim))
        return query.mul_(inverse_rms(query, self._epsilon))

    def _compress(
        self,
        projected: list[torch.Tensor],
        query_latent: tuple[torch.Tensor, torch.Tensor | None],
        addresses: CallAddresses,
        pages: LayerPages,
    ) -> KeySlots | None:
        """Update states and entries of this layer. Returns the entries each row attends to."""
        if self._compressor is None:
            return None
        assert pages.state is not None
        assert pages.entries is not None
        slots = addresses.compression[self._ratio]
        self._compressor.write_state(projected[0], slots, pages.state)
        if slots.num_closing:
            entries = self._compressor.close_windows(slots, pages.state)
            name = "cmp_c4" if self._ratio == CSA_RATIO else "cmp_c128"
            pages.entries.index_copy_(0, slots.entry_write[name], entries.to(pages.entries.dtype))
        if self._indexer is None:
            return slots.entries.get("cmp_c128")
        assert pages.inner_state is not None
        self._indexer.compressor.write_state(projected[1], slots, pages.inner_state)
        if slots.num_closing:
            self._indexer.write_keys(slots, pages.inner_state, pages.index_keys)
        return self._indexer.select(
            query_latent, projected[2], addresses.rotations[self._ratio], slots, pages.index_keys
        )

    def _attend(self, query: torch.Tensor, key_sources: list[tuple[torch.Tensor, KeySlots]]) -> torch.Tensor:
        """query [rows, heads, head_dim] -> outputs of the same shape, in slices of rows that bound the memory."""
        num_keys = sum(slots.slots.shape[1] for _, slots in key_sources)
        step = max(1, MAX_KEY_ELEMENTS // (num_keys * query.shape[2]))
        parts = []
        for begin in range(0, query.shape[0], step):
            rows = slice(begin, begin + step)
            keys = [gather_rows(pool, slots.slots[rows]).float() for pool, slots in key_sources]
            masks = [slots.mask[rows] for _, slots in key_sources]
            parts.append(attend(query[rows], keys, masks, self._sink, self._scale, round_weights=self._int8))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _project_output(self, output: torch.Tensor) -> torch.Tensor:
        """Grouped low-rank output projection: [rows, heads, head_dim] -> [rows, hidden]."""
        groups = self._config.o_groups
        grouped = output.view(output.shape[0], groups, -1).transpose(0, 1)
        down = batched_linear(grouped, self._output_down)  # [groups, rows, o_lora_rank]
        if not self._int8:
            return linear(down.transpose(0, 1).flatten(1), self._output_weight)
        # Each group of a row has its own activation scale.
        values, scales = quantize_rows(down)
        result = self._output_up[0](values[0], scales[0])
        for group in range(1, groups):
            result += self._output_up[group](values[group], scales[group])
        return round_bf16(result.mul_(self._output_scale))


def attend(
    query: torch.Tensor,
    keys: list[torch.Tensor],
    masks: list[torch.Tensor],
    sink: torch.Tensor,
    scale: float,
    *,
    round_weights: bool,
) -> torch.Tensor:
    """Softmax attention with one sink logit per head, which takes part in the denominator only.

    Sums run over tiles of 128 keys in order. A tile without any valid key adds exactly zero, so a row's result does not
    depend on how far the keys are padded for its company.

    Args:
        query: [rows, heads, head_dim] FP32.
        keys: key sources [rows, keys, head_dim] FP32, keys and values; zero where masked.
        masks: [rows, 1, keys] FP32 for each source, 0 or minus infinity; at least one 0 in each row.
        sink: [heads] FP32, not scaled.
        round_weights: round the exponentials to BF16 for the product with the values, as the W8A8 kernels do; the
            denominator is not rounded.

    Returns:
        [rows, heads, head_dim] FP32.
    """
    parts = [
        torch.baddbmm(mask, query, source.transpose(1, 2), alpha=scale)
        for source, mask in zip(keys, masks, strict=True)
    ]
    scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    maximum = scores.amax(dim=2, keepdim=True)
    weights = scores.sub_(maximum).exp_()
    factors = round_bf16(weights) if round_weights else weights
    denominator = (sink[:, None] - maximum).exp_()  # [rows, heads, 1]
    tiles = [tile for source in keys for tile in source.split(KEY_TILE, dim=1)]
    widths = [tile.shape[1] for tile in tiles]
    output = None
    for tile, tile_weights, tile_factors in zip(
        tiles, weights.split(widths, dim=2), factors.split(widths, dim=2), strict=True
    ):
        # Summed at full width, because the order of a sum depends on its length.
        denominator += F.pad(tile_weights, (0, KEY_TILE - tile.shape[1])).sum(dim=2, keepdim=True)
        output = torch.bmm(tile_factors, tile) if output is None else output.baddbmm_(tile_factors, tile)
    assert output is not None
    return output.div_(denominator)
