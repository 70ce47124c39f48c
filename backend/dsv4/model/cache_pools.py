"""Physical cache storage of the network: one tensor per layer and group, addressed by block id and row.

A block of a group owns one page in every layer of the group's family. The row content (DeepSeek V4 on PyPTO):

| group | layers | row in W8A8 | row in float |
|---|---|---|---|
| `ori` | all, and the prediction layers | BF16 key/value [head_dim] | FP32 |
| `cmp_c4`, `cmp_c128` | of that ratio | BF16 entry [head_dim] | FP32 |
| `idx` | ratio 4 | INT8 key [index_head_dim] and FP32 scale | FP32 key |
| `hca_state`, `csa_state`, `csa_inner_state` | ratio 128, 4, 4 | FP32 [key/value row, gate row] | FP32 |

Every pool has one more row than its blocks need. It stays zero and is where reads of absent positions go, so that
whatever an unwritten or re-used page holds, even NaN, never enters an arithmetic operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dsv4.cache.groups import CacheGroup
from dsv4.config.model_config import CSA_RATIO, HCA_RATIO, ModelConfig, Numerics


@dataclass(frozen=True)
class RowField:
    """One tensor of a group's pages: `width` elements of `dtype` per row."""

    width: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.width * self.dtype.itemsize


def row_fields(config: ModelConfig, group_name: str, numerics: Numerics) -> tuple[RowField, ...]:
    """What one row of one layer of a group stores."""
    value_dtype = torch.bfloat16 if numerics == "w8a8" else torch.float32
    if group_name in ("ori", "cmp_c4", "cmp_c128"):
        return (RowField(config.head_dim, value_dtype),)
    if group_name == "idx":
        if numerics == "w8a8":
            return RowField(config.index_head_dim, torch.int8), RowField(1, torch.float32)
        return (RowField(config.index_head_dim, torch.float32),)
    state_widths = {
        "hca_state": 2 * config.head_dim,
        "csa_state": 4 * config.head_dim,
        "csa_inner_state": 4 * config.index_head_dim,
    }
    return (RowField(state_widths[group_name], torch.float32),)


def group_layers(config: ModelConfig, group_name: str) -> tuple[int, ...]:
    """Hidden layers that have a page in every block of a group."""
    if group_name == "ori":
        return tuple(range(config.num_hidden_layers))
    return config.layers_with_ratio(HCA_RATIO if group_name in ("cmp_c128", "hca_state") else CSA_RATIO)


def block_bytes(config: ModelConfig, group: CacheGroup, *, numerics: Numerics, num_mtp_layers: int) -> int:
    """Bytes that one block of a group takes over all its layers, the prediction layers' pages included."""
    layers = len(group_layers(config, group.name)) + (num_mtp_layers if group.name == "ori" else 0)
    return layers * group.rows_per_block * sum(field.num_bytes for field in row_fields(config, group.name, numerics))


class CachePools:
    """All pages of one model replica (or of one rank).

    Args:
        groups: the seven groups; their ring lengths decide how block tables are read.
        num_blocks: group name -> physical blocks.
        num_mtp_layers: prediction layers; each has its own pages addressed by `ori` block ids.
        fill_nan: debugging aid: fill every page with NaN (INT8 keys: NaN scales) so that a read of an unwritten row
            shows.

    Attributes:
        groups: name -> CacheGroup.
        pages: group name -> layer -> one tensor [blocks * rows_per_block + 1, width] per row field.
        mtp_pages: prediction layer -> tensor [blocks * 128 + 1, head_dim].
    """

    def __init__(
        self,
        config: ModelConfig,
        groups: Sequence[CacheGroup],
        num_blocks: Mapping[str, int],
        *,
        numerics: Numerics,
        device: str | torch.device = "cpu",
        num_mtp_layers: int = 0,
        fill_nan: bool = False,
    ) -> None:
        self.groups = {group.name: group for group in groups}
        self.num_blocks = dict(num_blocks)
        self.numerics = numerics
        self.device = torch.device(device)

        def page(group: CacheGroup, field: RowField) -> torch.Tensor:
            rows = self.num_blocks[group.name] * group.rows_per_block
            tensor = torch.zeros(rows + 1, field.width, dtype=field.dtype, device=self.device)
            if fill_nan:
                tensor[:rows] = float("nan") if field.dtype.is_floating_point else 127
            return tensor

        self.pages = {
            group.name: {
                layer: tuple(page(group, field) for field in row_fields(config, group.name, numerics))
                for layer in group_layers(config, group.name)
            }
            for group in groups
        }
        (window_field,) = row_fields(config, "ori", numerics)
        self.mtp_pages = [page(self.groups["ori"], window_field) for _ in range(num_mtp_layers)]

    def absent_row(self, group_name: str) -> int:
        """Index of the row that is always zero."""
        return self.num_blocks[group_name] * self.groups[group_name].rows_per_block

    @property
    def num_bytes(self) -> int:
        """Memory of all pages in bytes."""
        pages = [tensor for layers in self.pages.values() for fields in layers.values() for tensor in fields]
        return sum(tensor.numel() * tensor.element_size() for tensor in [*pages, *self.mtp_pages])
