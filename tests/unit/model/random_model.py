"""Small random DeepSeek V4 checkpoints and the caches to run them with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from dsv4.cache.groups import cache_groups
from dsv4.checkpoint.names import CheckpointKind, expected_tensors
from dsv4.config import ModelConfig, Numerics
from dsv4.model import CachePools, DeepseekV4Model, ForwardBatch
from safetensors.torch import save_file

VECTORS = Path(__file__).resolve().parents[2] / "data" / "model"

DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I64": torch.int64,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def small_config(**changes: Any) -> dict[str, Any]:
    """All three attention kinds, both routers, one prediction layer. 32 index heads keep scores from being all zero."""
    document = json.loads((VECTORS / "config.json").read_text())
    document.update(
        hidden_size=64,
        head_dim=32,
        q_lora_rank=32,
        o_lora_rank=16,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        vocab_size=61,
    )
    document.update(changes)
    return document


def write_checkpoint(
    directory: Path, document: dict[str, Any], *, kind: CheckpointKind = "w8a8", seed: int = 0
) -> ModelConfig:
    """A checkpoint with random weights whose products keep the size of their input."""
    method = {"w8a8": "compressed-tensors", "source": "fp8"}[kind]
    document = {**document, "quantization_config": {"quant_method": method}}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(document))
    config = ModelConfig.from_directory(directory)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _random_tensor(name, expected.shape, expected.dtypes[0], config, generator)
        for name, expected in expected_tensors(config, kind).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return config


def _random_tensor(
    name: str, shape: tuple[int, ...], dtype: str, config: ModelConfig, generator: torch.Generator
) -> torch.Tensor:
    if dtype == "I64":
        order = torch.rand(shape[0], config.n_routed_experts, generator=generator).argsort(dim=1)
        return order[:, : shape[1]].contiguous()
    if dtype == "I8":
        return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    if dtype == "F8_E8M0":
        return torch.randint(120, 124, shape, generator=generator, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    values = torch.randn(shape, generator=generator)
    if name.endswith(".scale"):  # INT8 rows are uniform, with standard deviation 73
        return (1 + 0.2 * values.clamp(-2, 2)) / (73 * 8)
    if "norm" in name:
        values = 1 + 0.1 * values
    elif name.endswith("hc_attn_scale") or name.endswith("hc_ffn_scale"):
        values = 0.3 + 0.05 * values
    elif len(shape) == 2 and not name.endswith("ape"):
        values = values / shape[1] ** 0.5 if "embed" not in name else values
    else:
        values = 0.5 * values
    return values.to(DTYPES[dtype])


class Caches:
    """Pools for some sequences of one model, with scattered block ids."""

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        *,
        num_sequences: int = 1,
        max_model_len: int = 640,
        fill_nan: bool = True,
        seed: int = 0,
    ) -> None:
        groups = cache_groups(sliding_window=config.sliding_window, max_model_len=max_model_len)
        counts = {group.name: group.blocks_per_request * num_sequences for group in groups}
        self.pools = CachePools(config, groups, counts, numerics=numerics, num_mtp_layers=1, fill_nan=fill_nan)
        self.num_sequences = num_sequences
        self.shuffle(seed)

    def shuffle(self, seed: int) -> None:
        """Deal the blocks out anew; the pages keep what they hold."""
        generator = torch.Generator().manual_seed(seed)
        self.tables = {
            name: torch.randperm(count, generator=generator).view(self.num_sequences, -1)
            for name, count in self.pools.num_blocks.items()
        }

    def batch(self, *parts: tuple[int, int, torch.Tensor]) -> ForwardBatch:
        """Rows of several sequences: (sequence, first position, token ids)."""
        return ForwardBatch(
            token_ids=torch.cat([ids for _, _, ids in parts]),
            positions=torch.cat([torch.arange(start, start + ids.shape[0]) for _, start, ids in parts]),
            sequence_index=torch.cat([torch.full_like(ids, sequence) for sequence, _, ids in parts]),
            block_tables=self.tables,
        )


def run_sequence(
    model: DeepseekV4Model, caches: Caches, ids: torch.Tensor, chunks: list[int], *, sequence: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Feed `ids` in chunks of the given sizes, then one by one. Returns streams and prediction-layer streams."""
    streams, predictions = [], []
    start = 0
    sizes = iter(chunks)
    while start < ids.shape[0]:
        part = ids[start : start + next(sizes, 1)]
        bundle = model.forward(caches.batch((sequence, start, part)), caches.pools)
        following = ids[start + 1 : start + 1 + part.shape[0]]
        if following.shape[0]:
            batch = caches.batch((sequence, start, following))
            predictions.append(model.forward_mtp(bundle[: following.shape[0]], batch, caches.pools))
        streams.append(bundle)
        start += part.shape[0]
    return torch.cat(streams), torch.cat(predictions)
