from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError, ConfigurationError

from tests.unit.model.random_model import VECTORS, small_config


def test_fields_of_a_converted_checkpoint() -> None:
    config = ModelConfig.from_directory(VECTORS)
    assert config.compress_ratios == (0, 4, 128, 4, 128, 0)
    assert [config.layer_ratio(i) for i in range(5)] == [0, 4, 128, 4, 128]
    assert [config.is_hash_layer(i) for i in range(5)] == [True, True, True, False, False]
    assert config.layers_with_ratio(4) == (1, 3)
    assert config.mtp_ratio == 0
    assert config.checkpoint_format == "w8a8"
    assert config.rope_scaling.factor == 16
    assert config.eos_token_id == (1,)


def test_several_end_tokens() -> None:
    assert ModelConfig.from_dict(small_config(eos_token_id=[1, 5])).eos_token_id == (1, 5)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", "llama", "model_type"),
        ("hidden_size", None, "hidden_size is missing"),
        ("hidden_size", 64.5, "hidden_size is 64.5, must be an integer"),
        ("hidden_size", -64, "hidden_size is -64, must be positive"),
        ("rope_theta", "10000", "rope_theta is '10000', must be a number"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps"),
        ("compress_ratios", [0, 4, 128, 4, 128], "compress_ratios has 5 entries for 5 hidden layers and 1 prediction"),
        ("compress_ratios", [0, 4, 64, 4, 128, 0], "compress_ratios entries must be 0, 4 or 128"),
        ("compress_ratios", [0, 4, 128, 4, 128, 4], "prediction layers and must be 0"),
        ("compress_ratios", "0,4", "compress_ratios must be a list"),
        ("num_experts_per_tok", 9, "num_experts_per_tok is above n_routed_experts"),
        ("o_groups", 3, "o_groups does not divide"),
        ("qk_rope_head_dim", 15, "qk_rope_head_dim must be even"),
        ("scoring_func", "softmax", "scoring_func is 'softmax'"),
        ("num_key_value_heads", 4, "num_key_value_heads is 4"),
        ("expert_dtype", "int4", "expert_dtype is 'int4'"),
        ("rope_scaling", None, "rope_scaling is missing"),
        ("rope_scaling", {"type": "linear", "factor": 2}, "rope_scaling.type is 'linear'"),
        ("rope_scaling", {"type": "yarn", "factor": 2}, "rope_scaling.original_max_position_embeddings is missing"),
        ("quantization_config", {"quant_method": "awq"}, "quantization_config.quant_method is 'awq'"),
        ("eos_token_id", [], "eos_token_id"),
    ],
)
def test_wrong_fields_are_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ModelConfig.from_dict(small_config(**{field: value}))


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        ModelConfig.from_directory(tmp_path)
