"""Writes and reads the official source format: FP8 blocks, MXFP4 experts, BF16 and F32 for the rest."""

import json
from pathlib import Path
from typing import Any

import torch
from fake_quantization import decode_fp8, decode_mxfp4, encode_fp8, encode_mxfp4
from network import is_fp8
from safetensors.torch import load_file, save_file
from torch import Tensor

SHARD_BYTES = 2 << 20
KEPT_IN_F32 = ("hc_", ".ape", ".attn_sink", ".gate.bias")


def stored_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Training tensors (stacked experts, FP32) as the tensors of an official checkpoint."""
    stored: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if ".ffn.experts." in name:
            prefix, leaf = name.rsplit(".", 1)
            for expert, matrix in enumerate(value):
                base = f"{prefix}.{expert}.{leaf}"
                stored[f"{base}.weight"], stored[f"{base}.scale"] = encode_mxfp4(matrix)
        elif is_fp8(name):
            stored[name], stored[name.removesuffix("weight") + "scale"] = encode_fp8(value)
        elif not value.is_floating_point() or any(mark in name for mark in KEPT_IN_F32):
            stored[name] = value.contiguous()
        else:
            stored[name] = value.bfloat16()
    return stored


def write_checkpoint(tensors: dict[str, Tensor], config: dict[str, Any], folder: Path) -> int:
    """Write shards, index and config.json into `folder`; returns the bytes of all tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    shards: list[dict[str, Tensor]] = [{}]
    filled = total = 0
    for name, value in sorted(stored_tensors(tensors).items()):
        size = value.numel() * value.element_size()
        if filled + size > SHARD_BYTES and not name.endswith(".weight"):
            shards.append({})
            filled = 0
        shards[-1][name] = value
        filled, total = filled + size, total + size
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(index, folder / "model.safetensors.index.json")
    write_json(config, folder / "config.json")
    sampling = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"], "do_sample": False}
    write_json(sampling, folder / "generation_config.json")
    return total


def write_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """The training tensors of a stored checkpoint, dequantised to FP32 and with experts stacked."""
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    stored: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        stored |= load_file(folder / file)
    tensors: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, value in stored.items():
        scale = stored.get(name.removesuffix("weight") + "scale")
        if name.endswith(".scale"):
            continue
        if ".ffn.experts." in name:
            prefix, expert, leaf, _ = name.rsplit(".", 3)
            experts.setdefault(f"{prefix}.{leaf}", {})[int(expert)] = decode_mxfp4(value, scale)
        elif scale is not None:
            tensors[name] = decode_fp8(value, scale)
        else:
            tensors[name] = value.float() if value.is_floating_point() else value.long()
    tensors |= {name: torch.stack([rows[e] for e in range(len(rows))]) for name, rows in experts.items()}
    return tensors
