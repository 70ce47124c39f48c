"""`config.json` of a DeepSeek V4 checkpoint as one validated, immutable object."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from dsv4.errors import CheckpointError, ConfigurationError

Numerics = Literal["float", "w8a8"]
"""`float` computes in FP32 on dequantised weights, `w8a8` as the INT8 kernels do."""

CSA_RATIO = 4
"""Compress ratio of layers that attend to indexer-selected entries."""

HCA_RATIO = 128
"""Compress ratio of layers that attend to every entry."""


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the table that compressed layers use. No attention factor is applied to cos and sin."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of one DeepSeek V4 model; the attributes have the names of config.json.

    Attributes:
        compress_ratios: one entry for each hidden layer (0 sliding window, 4 CSA, 128 HCA), then one for each
            multi-token-prediction layer (always 0).
        eos_token_id: all token ids that end a generation.
        checkpoint_format: "source" (FP8 and MXFP4), "w8a8" (converted), or None when config.json names no quantization.
        expert_dtype: "fp4" or "fp8", how the source stores routed experts.
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    n_shared_experts: int = 1
    num_hash_layers: int = 3
    swiglu_limit: float = 10.0
    sliding_window: int = 128
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 1048576
    num_nextn_predict_layers: int = 0
    bos_token_id: int = 0
    eos_token_id: tuple[int, ...] = (1,)
    expert_dtype: Literal["fp4", "fp8"] = "fp4"
    checkpoint_format: Literal["source", "w8a8"] | None = None

    @classmethod
    def from_directory(cls, directory: str | Path) -> ModelConfig:
        """Read `directory`/config.json.

        Raises:
            CheckpointError: the file is missing or is not JSON.
            ConfigurationError: a field is missing or wrong; the message names it.
        """
        path = Path(directory) / "config.json"
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise CheckpointError(f"{path}: not JSON: {error}") from error
        if not isinstance(document, dict):
            raise CheckpointError(f"{path}: no JSON object")
        return cls.from_dict(document, label=str(path))

    @classmethod
    def from_dict(cls, document: Mapping[str, Any], *, label: str = "config.json") -> ModelConfig:
        """Check the fields of a config.json and keep those the network needs; other fields are ignored.

        Raises:
            ConfigurationError: a field is missing or wrong; the message starts with `label` and names it.
        """
        reader = _FieldReader(document, label)
        reader.require("model_type", {"deepseek_v4"})
        for name, accepted in _FIXED_FIELDS.items():
            reader.require_if_present(name, accepted)
        values: dict[str, Any] = {
            "rope_scaling": _rope_scaling(reader),
            "compress_ratios": reader.integers("compress_ratios"),
            "eos_token_id": reader.token_ids("eos_token_id", cls.eos_token_id),
            "expert_dtype": reader.choice("expert_dtype", ("fp4", "fp8"), "fp4"),
            "checkpoint_format": _checkpoint_format(reader),
        }
        for field in fields(cls):
            if field.name in values:
                continue
            default = None if field.name in _REQUIRED_FIELDS else field.default
            values[field.name] = reader.number(field.name, whole=field.type == "int", default=default)
        config = cls(**values)
        config._check(label)
        return config

    def layer_ratio(self, layer: int) -> int:
        """Compress ratio of a hidden layer: 0, 4 or 128."""
        return self.compress_ratios[layer]

    @property
    def mtp_ratio(self) -> int:
        """Compress ratio of the multi-token-prediction layers, which attend to the sliding window only."""
        return 0

    def is_hash_layer(self, layer: int) -> bool:
        """Whether a hidden layer's router looks experts up by token id."""
        return layer < self.num_hash_layers

    def layers_with_ratio(self, ratio: int) -> tuple[int, ...]:
        """Hidden layers of one attention kind, ascending."""
        return tuple(i for i in range(self.num_hidden_layers) if self.compress_ratios[i] == ratio)

    def _check(self, label: str) -> None:
        for name in _POSITIVE_FIELDS:
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{label}: {name} is {getattr(self, name)}, must be positive")
        expected_ratios = self.num_hidden_layers + self.num_nextn_predict_layers
        problems = (
            (
                "compress_ratios",
                len(self.compress_ratios) < expected_ratios,
                f"has {len(self.compress_ratios)} entries for {self.num_hidden_layers} hidden layers and "
                f"{self.num_nextn_predict_layers} prediction layers",
            ),
            (
                "compress_ratios",
                any(ratio not in (0, CSA_RATIO, HCA_RATIO) for ratio in self.compress_ratios),
                f"entries must be 0, {CSA_RATIO} or {HCA_RATIO}",
            ),
            (
                "compress_ratios",
                any(self.compress_ratios[self.num_hidden_layers : expected_ratios]),
                "the entries after the hidden layers belong to the prediction layers and must be 0",
            ),
            ("num_hash_layers", self.num_hash_layers < 0, "must not be negative"),
            ("num_nextn_predict_layers", self.num_nextn_predict_layers < 0, "must not be negative"),
            ("num_experts_per_tok", self.num_experts_per_tok > self.n_routed_experts, "is above n_routed_experts"),
            ("qk_rope_head_dim", self.qk_rope_head_dim % 2 != 0, "must be even"),
            ("qk_rope_head_dim", self.qk_rope_head_dim > self.head_dim, "is above head_dim"),
            (
                "index_head_dim",
                self.qk_rope_head_dim > self.index_head_dim and CSA_RATIO in self.compress_ratios,
                "is below qk_rope_head_dim",
            ),
            ("o_groups", self.num_attention_heads % self.o_groups != 0, "does not divide num_attention_heads"),
        )
        for name, wrong, text in problems:
            if wrong:
                raise ConfigurationError(f"{label}: {name} {text}")


_FIXED_FIELDS: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1,),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
}
"""Fields with a single supported value; anything else would silently change the mathematics."""

_REQUIRED_FIELDS = frozenset(
    field.name
    for field in fields(ModelConfig)
    if field.default is field.default_factory  # both MISSING
)

_POSITIVE_FIELDS = tuple(
    field.name
    for field in fields(ModelConfig)
    if field.type in ("int", "float")
    and field.name not in ("num_hash_layers", "num_nextn_predict_layers", "bos_token_id")
)


class _FieldReader:
    """Typed access to the fields of one JSON object; every error names file and field."""

    def __init__(self, document: Mapping[str, Any], label: str, parent: str = "") -> None:
        self.document = document
        self._label = label
        self._parent = parent

    def error(self, name: str, text: str) -> ConfigurationError:
        return ConfigurationError(f"{self._label}: {self._parent}{name} {text}")

    def require(self, name: str, accepted: set[str]) -> None:
        if self.document.get(name) not in accepted:
            raise self.error(name, f"is {self.document.get(name)!r}, must be {' or '.join(sorted(accepted))}")

    def require_if_present(self, name: str, accepted: tuple[Any, ...]) -> None:
        value = self.document.get(name, accepted[0])
        if value is not None and value not in accepted:
            raise self.error(name, f"is {value!r}; only {accepted[0]!r} is supported")

    def number(self, name: str, *, whole: bool, default: Any = None) -> Any:
        value = self.document.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        kinds = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            raise self.error(name, f"is {value!r}, must be {'an integer' if whole else 'a number'}")
        return value if whole else float(value)

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.document.get(name)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.error(name, "must be a list of integers")
        return tuple(value)

    def token_ids(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        value = self.document.get(name, list(default))
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(type(item) is int and item >= 0 for item in ids):
            raise self.error(name, f"is {value!r}, must be a token id or a list of them")
        return tuple(ids)

    def choice(self, name: str, accepted: tuple[str, ...], default: str) -> str:
        value = self.document.get(name)
        if value is None:
            return default
        if value not in accepted:
            raise self.error(name, f"is {value!r}, must be {' or '.join(accepted)}")
        return str(value)

    def child(self, name: str) -> _FieldReader | None:
        value = self.document.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, "must be an object")
        return _FieldReader(value, self._label, f"{self._parent}{name}.")


def _rope_scaling(reader: _FieldReader) -> RopeScaling:
    scaling = reader.child("rope_scaling")
    if scaling is None:
        raise reader.error("rope_scaling", "is missing")
    kind = scaling.document.get("type", scaling.document.get("rope_type"))
    if kind != "yarn":
        raise scaling.error("type", f"is {kind!r}, must be yarn")
    return RopeScaling(
        factor=scaling.number("factor", whole=False),
        beta_fast=scaling.number("beta_fast", whole=False, default=32),
        beta_slow=scaling.number("beta_slow", whole=False, default=1),
        original_max_position_embeddings=scaling.number("original_max_position_embeddings", whole=True),
    )


def _checkpoint_format(reader: _FieldReader) -> str | None:
    quantization = reader.child("quantization_config")
    if quantization is None:
        return None
    method = quantization.document.get("quant_method")
    formats = {"fp8": "source", "compressed-tensors": "w8a8"}
    if method not in formats:
        raise quantization.error("quant_method", f"is {method!r}, must be {' or '.join(formats)}")
    return formats[method]
