"""Synthetic source checkpoints in the official layout, for tests and benchmarks.

Weights are random with realistic spreads; FP8 and MXFP4 are made from float weights the way quantizers do it, so scale
ranges look like those of a release.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dsv4.checkpoint.names import Storage, WeightSpec, source_tensors, weights
from dsv4.checkpoint.safetensors_file import build_header
from dsv4_converter.dimensions import Dimensions
from numpy.typing import NDArray

Tensor = tuple[str, tuple[int, ...], bytes]
"""dtype name, shape, bytes"""


@dataclass(frozen=True)
class Layout:
    """Shape of a synthetic checkpoint. The defaults are small and ragged: multiples of 32 but not of 128."""

    hidden: int = 160
    intermediate: int = 96
    heads: int = 8
    head_dim: int = 32
    q_lora: int = 96
    o_groups: int = 8
    o_lora: int = 36
    index_heads: int = 4
    index_dim: int = 32
    vocab: int = 512
    experts: int = 8
    experts_per_token: int = 6
    hash_layers: int = 1
    ratios: tuple[int, ...] = (0, 4, 128, 4)
    mtp: int = 1
    dspark_targets: tuple[int, ...] = ()
    expert_dtype: str = "fp4"
    float_scales: bool = False
    shards: int = 3
    split_scales: bool = False
    degrees_of_freedom: int = 0
    unique_experts: int = 1 << 30
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)

    def config_json(self) -> dict[str, Any]:
        """The config.json of the checkpoint."""
        content: dict[str, Any] = {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.intermediate,
            "num_hidden_layers": len(self.ratios),
            "num_attention_heads": self.heads,
            "num_key_value_heads": 1,
            "head_dim": self.head_dim,
            "qk_rope_head_dim": 8,
            "q_lora_rank": self.q_lora,
            "o_groups": self.o_groups,
            "o_lora_rank": self.o_lora,
            "index_n_heads": self.index_heads,
            "index_head_dim": self.index_dim,
            "index_topk": 512,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.experts_per_token,
            "num_hash_layers": self.hash_layers,
            "num_nextn_predict_layers": self.mtp,
            "hc_mult": 4,
            "compress_ratios": [*self.ratios, *([0] * max(1, self.mtp))],
            "expert_dtype": self.expert_dtype,
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "scale_fmt": "ue8m0",
                "weight_block_size": [128, 128],
            },
        }
        if self.dspark_targets:
            content |= {
                "dspark_block_size": 5,
                "dspark_target_layer_ids": list(self.dspark_targets),
                "dspark_markov_rank": 16,
                "dspark_noise_token_id": 7,
            }
        return content | self.config


RAGGED = Layout()

# One layer of Flash: 256 experts of 4096 x 2048, a small vocabulary.
FLASH_LAYER = Layout(
    hidden=4096,
    intermediate=2048,
    heads=64,
    head_dim=512,
    q_lora=1024,
    o_lora=1024,
    index_heads=64,
    index_dim=128,
    vocab=4096,
    experts=256,
    ratios=(0,),
    mtp=0,
    shards=1,
    unique_experts=4,
)


def make_source(directory: Path, layout: Layout = RAGGED) -> Path:
    """Write a source checkpoint and return its directory."""
    directory.mkdir(parents=True)
    config = layout.config_json()
    dimensions = Dimensions.from_config(config)
    specs = list(weights(dimensions))
    expected = {}
    for spec in specs:
        expected.update(source_tensors(spec, expert_dtype=layout.expert_dtype))
    shard_of = _distribute(layout, specs)
    generated = _generate(layout, dimensions, specs)
    pending: dict[str, dict[str, Tensor]] = {}
    for name, tensor in generated:
        pending.setdefault(shard_of[name], {})[name] = tensor
    for shard, tensors in pending.items():
        write_shard(directory / shard, tensors)
    write_json(directory / "config.json", config)
    write_index(directory, shard_of)
    write_json(directory / "tokenizer.json", {"version": "1.0"})
    write_json(directory / "generation_config.json", {"do_sample": True})
    (directory / "LICENSE").write_text("synthetic\n")
    return directory


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": 0}, "weight_map": weight_map})


def write_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file in the given order."""
    header, _ = build_header([(name, dtype, shape) for name, (dtype, shape, _) in tensors.items()], {"format": "pt"})
    with path.open("wb") as stream:
        stream.write(header)
        for _, _, content in tensors.values():
            stream.write(content)


def read_shard(path: Path) -> dict[str, Tensor]:
    """Read a shard for tampering."""
    from dsv4.checkpoint.safetensors_file import SafetensorsFile

    with SafetensorsFile(path) as file:
        return {name: (entry.dtype, entry.shape, file.read(name)) for name, entry in file.entries.items()}


def _distribute(layout: Layout, specs: list[WeightSpec]) -> dict[str, str]:
    names = [f"model-{i + 1:05d}-of-{layout.shards:05d}.safetensors" for i in range(layout.shards)]
    shard_of = {}
    for position, spec in enumerate(specs):
        index = position * layout.shards // len(specs)
        shard_of[spec.name] = names[index]
        if spec.storage.quantized:
            moved = layout.split_scales and position % 3 == 0
            shard_of[spec.scale_name] = names[(index + 1) % layout.shards] if moved else names[index]
    return shard_of


def _generate(layout: Layout, dimensions: Dimensions, specs: list[WeightSpec]) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(layout.seed)
    experts: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
    for spec in specs:
        if not spec.storage.quantized:
            yield spec.name, _plain(layout, dimensions, spec, generator)
            continue
        packed = spec.storage is Storage.EXPERT_TO_INT8 and layout.expert_dtype == "fp4"
        unique_key = ("", "")
        if spec.storage is Storage.EXPERT_TO_INT8:
            parts = spec.name.split(".")
            unique_key = (parts[-2], str(int(parts[-3]) % layout.unique_experts))
            if layout.unique_experts < layout.experts and unique_key in experts:
                yield spec.name, experts[unique_key][0]
                yield spec.scale_name, experts[unique_key][1]
                continue
        values = _matrix(layout, spec.shape, generator)
        pair = quantize_mxfp4(values) if packed else quantize_fp8(values, float_scales=layout.float_scales)
        if spec.storage is Storage.EXPERT_TO_INT8 and layout.unique_experts < layout.experts:
            experts[unique_key] = pair
        yield spec.name, pair[0]
        yield spec.scale_name, pair[1]


def _matrix(layout: Layout, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if layout.degrees_of_freedom:
        squares = sum(torch.randn(shape, generator=generator).square_() for _ in range(layout.degrees_of_freedom))
        values /= (squares / layout.degrees_of_freedom).sqrt()
    values *= 0.02 * torch.exp(0.15 * torch.randn(shape[0], 1, generator=generator))
    return values * torch.exp(0.15 * torch.randn(1, shape[1], generator=generator))


def _plain(layout: Layout, dimensions: Dimensions, spec: WeightSpec, generator: torch.Generator) -> Tensor:
    if spec.name.endswith("tid2eid"):
        ids = torch.randint(0, dimensions.n_routed_experts, spec.shape, generator=generator)
        return "I64", spec.shape, ids.numpy().tobytes()
    values = torch.randn(spec.shape, generator=generator) * 0.02 + (1 if "norm" in spec.name else 0)
    if spec.dtypes[0] == "F32":
        return "F32", spec.shape, values.numpy().tobytes()
    return "BF16", spec.shape, values.bfloat16().view(torch.int16).numpy().tobytes()


def quantize_fp8(values: torch.Tensor, *, float_scales: bool = False) -> tuple[Tensor, Tensor]:
    """[rows, columns] float -> F8_E4M3 with a scale for each 128x128 block."""
    rows, columns = values.shape
    blocks = (-(-rows // 128), -(-columns // 128))
    padded = torch.zeros(128 * blocks[0], 128 * blocks[1])
    padded[:rows, :columns] = values
    largest = padded.view(blocks[0], 128, blocks[1], 128).abs().amax(dim=(1, 3)).clamp_min(1e-30)
    scales = largest / 448
    if not float_scales:
        scales = torch.exp2(torch.ceil(torch.log2(scales)).clamp(-127, 127))
    full = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    codes = (values / full).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    if float_scales:
        scale: Tensor = ("F32", blocks, scales.numpy().tobytes())
    else:
        scale = ("F8_E8M0", blocks, (torch.log2(scales) + 127).to(torch.uint8).numpy().tobytes())
    return ("F8_E4M3", (rows, columns), codes.numpy().tobytes()), scale


_E2M1_BOUNDARIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def quantize_mxfp4(values: torch.Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] float -> packed E2M1 (low nibble = even column) with a scale for each 32 columns of a row."""
    rows, columns = values.shape
    groups = values.view(rows, columns // 32, 32)
    largest = groups.abs().amax(dim=2).clamp_min(1e-30)
    exponents = torch.ceil(torch.log2(largest / 6)).clamp(-127, 127)
    scaled = (groups / torch.exp2(exponents)[:, :, None]).reshape(rows, columns)
    codes = torch.bucketize(scaled.abs(), _E2M1_BOUNDARIES).to(torch.uint8) | ((scaled < 0).to(torch.uint8) << 3)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    scales = (exponents + 127).to(torch.uint8)
    return (
        ("I8", (rows, columns // 2), packed.numpy().tobytes()),
        ("F8_E8M0", (rows, columns // 32), scales.numpy().tobytes()),
    )


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def dequantize(weight: Tensor, scale: Tensor) -> torch.Tensor:
    """float32 weights of a stored pair, by the definition of the formats."""
    (weight_dtype, shape, content), (scale_dtype, scale_shape, scale_content) = weight, scale
    if scale_dtype == "F32":
        scales = torch.frombuffer(bytearray(scale_content), dtype=torch.float32).view(scale_shape)
    else:
        raw = torch.frombuffer(bytearray(scale_content), dtype=torch.uint8).view(scale_shape)
        scales = raw.view(torch.float8_e8m0fnu).float()
    if weight_dtype == "I8":
        packed = np.frombuffer(content, np.uint8).reshape(shape)
        codes: NDArray[np.uint8] = np.stack([packed & 15, packed >> 4], axis=-1).reshape(shape[0], -1)
        return torch.from_numpy(_E2M1[codes]) * scales.repeat_interleave(32, 1)
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape).view(torch.float8_e4m3fn).float()
    return values * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]


def round_to_nearest(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The round-to-nearest rule: INT8 rows and float32 scales."""
    scales = values.abs().amax(dim=1).clamp_min(1e-4) / 127
    return torch.round(values / scales[:, None]).clamp(-127, 127).to(torch.int8), scales


def variant(**changes: Any) -> Layout:
    """The ragged layout with changes."""
    return replace(RAGGED, **changes)
