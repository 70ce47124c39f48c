"""The table of tensors against the counts of the released checkpoints and the sidecar's known size."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
from dsv4.checkpoint.names import expected_tensors
from dsv4.checkpoint.safetensors_file import DTYPE_BYTES
from dsv4.checkpoint.sidecar import SIDECAR_RULES, stacked_shape
from dsv4_converter.dimensions import Dimensions

FLASH: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "hc_mult": 4,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}
PRO = FLASH | {
    "hidden_size": 7168,
    "moe_intermediate_size": 3072,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "n_routed_experts": 384,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}
DRAFTER = FLASH | {
    "compress_ratios": [*FLASH["compress_ratios"], 0, 0],
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}


@cache
def table(name: str, kind: Any) -> dict[str, Any]:
    config = {"flash": FLASH, "pro": PRO, "drafter": DRAFTER}[name]
    return expected_tensors(Dimensions.from_config(config), kind)


def num_bytes(tensors: dict[str, Any]) -> int:
    return sum(math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtypes[0]] for tensor in tensors.values())


@pytest.mark.parametrize(("name", "count"), [("flash", 69187), ("pro", 145116)])
def test_number_of_source_tensors(name: str, count: int) -> None:
    assert len(table(name, "source")) == count


def test_converted_flash() -> None:
    tensors = table("flash", "w8a8")
    assert len(tensors) == 69055
    assert round(num_bytes(tensors) / 2**30, 1) == 274.4


def test_source_sizes() -> None:
    assert round(num_bytes(table("flash", "source")) / 2**30, 1) == 148.6
    assert round(num_bytes(table("pro", "source")) / 2**30) == 805


def test_drafter_blocks() -> None:
    names = table("drafter", "source")
    assert [sum(name.startswith(f"mtp.{block}.") for name in names) for block in range(4)] == [1568, 1565, 1572, 0]


def test_sidecar_size_of_flash() -> None:
    config = Dimensions.from_config(FLASH)
    total = sum(math.prod(stacked_shape(config, rule, 8)) * DTYPE_BYTES[rule.dtype] for rule in SIDECAR_RULES)
    assert len(SIDECAR_RULES) == 49
    assert round(total / 2**30, 1) == 322.8
