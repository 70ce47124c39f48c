"""The part of config.json that decides a checkpoint's tensors, read and checked for conversion.

A checkpoint can be converted that no engine at hand can serve, so this asks for less than a model configuration does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dsv4.errors import ConfigurationError

COMPRESS_RATIOS = (0, 4, 128)

_OPTIONAL_DEFAULTS = {"n_shared_experts": 1, "num_nextn_predict_layers": 0, "dspark_markov_rank": 0}
_MAY_BE_ZERO = ("num_hash_layers", "num_nextn_predict_layers", "dspark_markov_rank")


@dataclass(frozen=True)
class Dimensions:
    """Fields of config.json under their own names; see `dsv4.checkpoint.names.ModelDimensions`."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    num_hash_layers: int
    hc_mult: int
    index_n_heads: int
    index_head_dim: int
    num_nextn_predict_layers: int
    dspark_markov_rank: int
    compress_ratios: tuple[int, ...]
    dspark_target_layer_ids: tuple[int, ...]
    expert_dtype: str

    @classmethod
    def from_config(cls, config: Mapping[str, Any], label: str = "config.json") -> Dimensions:
        """Read the fields. Raises ConfigurationError naming the field."""
        integers = {
            field.name: _read_integer(config, field.name, label) for field in fields(cls) if field.type == "int"
        }
        expert_dtype = config.get("expert_dtype") or "fp4"
        if expert_dtype not in ("fp4", "fp8"):
            raise ConfigurationError(f"{label}: expert_dtype is {expert_dtype!r}, expected 'fp4' or 'fp8'")
        dimensions = cls(
            **integers,
            compress_ratios=_read_integers(config, "compress_ratios", label),
            dspark_target_layer_ids=(
                _read_integers(config, "dspark_target_layer_ids", label)
                if config.get("dspark_target_layer_ids")
                else ()
            ),
            expert_dtype=expert_dtype,
        )
        dimensions._check(label)
        return dimensions

    def _check(self, label: str) -> None:
        ratios, layers = self.compress_ratios, self.num_hidden_layers
        unknown = [ratio for ratio in ratios if ratio not in COMPRESS_RATIOS]
        if unknown:
            raise ConfigurationError(f"{label}: compress_ratios holds {unknown[0]}, known are 0, 4 and 128")
        extra = len(ratios) - layers
        allowed = range(1, 65) if self.dspark_target_layer_ids else {1, self.num_nextn_predict_layers}
        if extra not in allowed and not (extra == 0 and self.num_nextn_predict_layers == 0):
            raise ConfigurationError(
                f"{label}: compress_ratios has {len(ratios)} entries for {layers} hidden layers and "
                f"{self.num_nextn_predict_layers} MTP layers"
            )
        if any(ratios[layers:]):
            raise ConfigurationError(f"{label}: the compress_ratios of MTP layers must be 0, got {ratios[layers:]}")
        if (self.num_attention_heads * self.head_dim) % self.o_groups:
            raise ConfigurationError(f"{label}: o_groups {self.o_groups} does not divide the heads' width")
        if self.expert_dtype == "fp4" and (self.hidden_size % 32 or self.moe_intermediate_size % 32):
            raise ConfigurationError(
                f"{label}: hidden_size and moe_intermediate_size must be multiples of 32 for MXFP4 experts"
            )
        if self.dspark_target_layer_ids and not self.dspark_markov_rank:
            raise ConfigurationError(f"{label}: dspark_target_layer_ids without dspark_markov_rank")


def _read_integer(config: Mapping[str, Any], name: str, label: str) -> int:
    value = config.get(name, _OPTIONAL_DEFAULTS.get(name))
    if value is None and name in _OPTIONAL_DEFAULTS:
        value = _OPTIONAL_DEFAULTS[name]
    minimum = 0 if name in _MAY_BE_ZERO else 1
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value < 1 << 31:
        problem = "is missing" if name not in config else f"is {value!r}"
        raise ConfigurationError(f"{label}: {name} {problem}, expected an integer of at least {minimum}")
    return value


def _read_integers(config: Mapping[str, Any], name: str, label: str) -> tuple[int, ...]:
    value = config.get(name)
    if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        problem = "is missing" if name not in config else "is not a list of integers"
        raise ConfigurationError(f"{label}: {name} {problem}")
    return tuple(value)
