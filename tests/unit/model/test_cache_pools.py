from __future__ import annotations

import pytest
from dsv4.cache.groups import cache_groups
from dsv4.config import ModelConfig
from dsv4.model import CachePools, block_bytes

from tests.unit.model.random_model import small_config

# Page bytes of DeepSeek V4 Flash over all layers, as PyPTO serving allocates them (one prediction layer).
FLASH_BLOCK_BYTES = {
    "ori": 5_767_168,
    "cmp_c128": 20_480,
    "cmp_c4": 688_128,
    "idx": 88_704,
    "hca_state": 655_360,
    "csa_state": 688_128,
    "csa_inner_state": 172_032,
}


def flash_caches() -> ModelConfig:
    return ModelConfig.from_dict(
        small_config(
            num_hidden_layers=43,
            compress_ratios=[0, 0, *([4, 128] * 20), 4, 0],
            head_dim=512,
            qk_rope_head_dim=64,
            index_head_dim=128,
        )
    )


def test_block_bytes_of_flash() -> None:
    config = flash_caches()
    groups = cache_groups(sliding_window=128, max_model_len=16384)
    actual = {group.name: block_bytes(config, group, numerics="w8a8", num_mtp_layers=1) for group in groups}
    assert actual == FLASH_BLOCK_BYTES
    per_request = sum(actual[group.name] * group.blocks_per_request for group in groups)
    assert per_request == 212_492_288


@pytest.mark.parametrize("numerics", ["float", "w8a8"])
def test_pools_take_the_accounted_bytes_and_a_zero_row(numerics: str) -> None:
    config = ModelConfig.from_dict(small_config())
    groups = cache_groups(sliding_window=128, max_model_len=256)
    counts = {group.name: index + 1 for index, group in enumerate(groups)}
    pools = CachePools(config, groups, counts, numerics=numerics, num_mtp_layers=1, fill_nan=True)
    expected = sum(
        counts[group.name] * block_bytes(config, group, numerics=numerics, num_mtp_layers=1) for group in groups
    )
    tensors = [tensor for layers in pools.pages.values() for fields in layers.values() for tensor in fields]
    zero_rows = sum(tensor[-1].numel() * tensor.element_size() for tensor in [*tensors, *pools.mtp_pages])
    assert pools.num_bytes == expected + zero_rows
    for tensor in [*tensors, *pools.mtp_pages]:
        assert not tensor[-1].any()
        if tensor.is_floating_point():
            assert tensor[:-1].isnan().all()
