"""The config.json of a converted checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsv4.chat.revision import MAX_ENCODING_FILE_BYTES, PROFILE_KEY, detect_revision
from dsv4.checkpoint.names import is_drafter, num_mtp_blocks

from dsv4_converter.dimensions import Dimensions

ENCODING_FILE = Path("encoding") / "encoding_dsv4.py"


def served_config(config: Mapping[str, Any], dimensions: Dimensions, directory: Path) -> dict[str, Any]:
    """All source fields, with the quantization described as compressed-tensors and the reasoning-effort revision noted.

    Args:
        config: the source's config.json.
        directory: the source's directory, whose ``encoding/encoding_dsv4.py`` tells the revision (read, never run).
    """
    return {
        **config,
        "quantization_config": _quantization_config(dimensions),
        PROFILE_KEY: detect_revision(config, _encoding_source(directory)).value,
    }


def _encoding_source(directory: Path) -> str | None:
    path = directory / ENCODING_FILE
    try:
        if not path.is_file() or path.stat().st_size > MAX_ENCODING_FILE_BYTES:
            return None
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _quantization_config(dimensions: Dimensions) -> dict[str, Any]:
    return {
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": _scheme(dynamic=True, observer="memoryless", strategy="token"),
                "activation_use_clip": False,
                "output_activations": None,
                "weights": _scheme(dynamic=False, observer="minmax", strategy="channel"),
            }
        },
        "format": "int-quantized",
        "global_compression_ratio": 1,
        "ignore": list(_ignored_modules(dimensions)),
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "li_cache_scheme": {"type": "int", "num_bits": 8},
    }


def _scheme(*, dynamic: bool, observer: str, strategy: str) -> dict[str, Any]:
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": dynamic,
        "group_size": None,
        "num_bits": 8,
        "observer": observer,
        "observer_kwargs": {},
        "strategy": strategy,
        "symmetric": True,
        "type": "int",
    }


def _ignored_modules(dimensions: Dimensions) -> Iterator[str]:
    """Linear modules that stay BF16."""
    for layer, ratio in enumerate(dimensions.compress_ratios[: dimensions.num_hidden_layers]):
        prefix = f"layers.{layer}.attn"
        yield from (f"{prefix}.{name}" for name in ("wq_a", "wkv", "wo_a"))
        if ratio == 4:
            yield f"{prefix}.indexer.weights_proj"
            yield from (f"{prefix}.indexer.compressor.{name}" for name in ("wgate", "wkv"))
        if ratio:
            yield from (f"{prefix}.compressor.{name}" for name in ("wgate", "wkv"))
    # The first MTP block is listed even where a checkpoint has none: loaders of this format expect the entries.
    for index in range(max(1, num_mtp_blocks(dimensions))):
        yield from (f"mtp.{index}.attn.{name}" for name in ("wq_a", "wkv", "wo_a"))
    if is_drafter(dimensions):
        last = num_mtp_blocks(dimensions) - 1
        yield "mtp.0.main_proj"
        yield from (f"mtp.{last}.markov_head.{name}" for name in ("markov_w1", "markov_w2"))
        yield f"mtp.{last}.confidence_head.proj"
    else:
        yield "mtp.0.head"
    yield "head"
