"""The float form against the implementation in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dsv4.checkpoint import load_weights
from dsv4.checkpoint.names import weights as weight_specs
from dsv4.config import ModelConfig
from dsv4.model import DeepseekV4Model
from safetensors.torch import save_file

from tests.unit.model.random_model import Caches, run_sequence, small_config, write_checkpoint

NUM_TOKENS = 300


def reference_logits(directory: Path, config: ModelConfig, ids: torch.Tensor) -> torch.Tensor:
    """Logits of transformers on the dequantised weights, which it reads under their official names."""
    from transformers import DeepseekV4ForCausalLM

    weights = load_weights(directory, config, numerics="float")
    tensors = {}
    for spec in weight_specs(config):
        if not spec.name.startswith("mtp."):
            stored = weights.stored(spec.name)
            floating = stored.is_floating_point() or spec.storage.quantized
            tensors[spec.name] = weights.matrix(spec.name) if floating else stored.clone()
    plain = directory / "plain"
    plain.mkdir()
    document = json.loads((directory / "config.json").read_text())
    del document["quantization_config"]
    (plain / "config.json").write_text(json.dumps(document))
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    model, report = DeepseekV4ForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model(ids[None]).logits[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compress_ratios": [128, 4, 4, 128, 0, 0], "num_hash_layers": 1, "index_topk": 8, "sliding_window": 64},
    ],
    ids=["all kinds", "other order, short window"],
)
def test_logits_equal_transformers(tmp_path: Path, changes: dict[str, object]) -> None:
    config = write_checkpoint(tmp_path, small_config(**changes), seed=1)
    ids = torch.randint(0, config.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(2))
    expected = reference_logits(tmp_path, config, ids)
    model = DeepseekV4Model(config, load_weights(tmp_path, config, numerics="float"), numerics="float")

    in_tiles, _ = run_sequence(model, Caches(config, "float"), ids, [128, 128, 44])
    assert (model.logits(in_tiles) - expected).abs().max() < 1e-4

    uneven, _ = run_sequence(model, Caches(config, "float", seed=3), ids, [5, 1, 122, 7, 100, 2, 40])
    assert (model.logits(uneven) - expected).abs().max() < 1e-4
