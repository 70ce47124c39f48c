from __future__ import annotations

import math

import pytest
import torch
from dsv4.config import ModelConfig
from dsv4.model.rope import compress_table, main_table

from tests.unit.model.random_model import small_config

# Inverse frequencies of DeepSeek V4 Flash's compressed layers (64 rotary dimensions), computed in FP64 and rounded.
FLASH_COMPRESS_FREQUENCIES = {
    0: 1.0,
    1: 0.687656045,
    12: 0.0111803403,
    15: 3.63553851e-3,
    16: 2.26562494e-3,
    20: 2.96977785e-4,
    24: 1.95312532e-5,
    25: 5.37231244e-6,
    31: 5.68052940e-7,
}


def flash_rope() -> ModelConfig:
    return ModelConfig.from_dict(small_config(head_dim=128, qk_rope_head_dim=64, index_head_dim=128))


def test_compress_frequencies_of_flash() -> None:
    table = compress_table(flash_rope(), numerics="float", device=torch.device("cpu"))
    for index, expected in FLASH_COMPRESS_FREQUENCIES.items():
        assert float(table.frequencies[index]) == pytest.approx(expected, rel=2e-6)


def test_main_frequencies() -> None:
    table = main_table(flash_rope(), numerics="float", device=torch.device("cpu"))
    assert table.frequencies.tolist() == pytest.approx([10000 ** (-2 * i / 64) for i in range(32)], rel=1e-6)


def test_rotation_turns_interleaved_pairs_of_the_last_dimensions() -> None:
    table = main_table(flash_rope(), numerics="float", device=torch.device("cpu"))
    x = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([5, 1000])
    actual = table.at(positions).apply(x.clone())
    assert torch.equal(actual[..., :64], x[..., :64])
    for row, position in enumerate((5, 1000)):
        for pair in (0, 7, 31):
            angle = position * 10000 ** (-2 * pair / 64)
            a, b = x[row, 1, 64 + 2 * pair].item(), x[row, 1, 65 + 2 * pair].item()
            expected = [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
            assert actual[row, 1, 64 + 2 * pair : 66 + 2 * pair].tolist() == pytest.approx(expected, abs=2e-4)


def test_inverse_rotation_undoes_the_rotation() -> None:
    rotation = compress_table(flash_rope(), numerics="float", device=torch.device("cpu")).at(torch.tensor([3, 777]))
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(rotation.apply_inverse(rotation.apply(x.clone())), x, atol=1e-6)


def test_w8a8_tables_are_rounded_to_bf16() -> None:
    rotation = main_table(flash_rope(), numerics="w8a8", device=torch.device("cpu")).at(torch.arange(50))
    for factors in (rotation.cosine, rotation.sine):
        assert torch.equal(factors, factors.bfloat16().float())
