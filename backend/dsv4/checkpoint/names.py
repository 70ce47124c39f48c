"""Names, shapes and dtypes of every tensor of a DeepSeek V4 checkpoint, computed from its configuration.

Two kinds of checkpoint share the names: the *source* as released (FP8 with block scales, routed experts packed MXFP4 or
FP8) and the *w8a8* form (INT8 rows with one F32 scale each, the rest BF16).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

CheckpointKind = Literal["source", "w8a8"]

FP8_BLOCK = 128
MXFP4_GROUP = 32

FLOAT_DTYPES = ("BF16", "F32", "F16")
INTEGER_DTYPES = ("I64", "I32")


class ModelDimensions(Protocol):
    """The fields of config.json that decide names and shapes. Configuration objects of any kind that have them fit.

    `dsv4.config.ModelConfig` does. A drafter checkpoint (DSpark) also has ``dspark_target_layer_ids`` and
    ``dspark_markov_rank``; they are looked up by name and may be missing or None.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def q_lora_rank(self) -> int: ...
    @property
    def o_lora_rank(self) -> int: ...
    @property
    def o_groups(self) -> int: ...
    @property
    def n_routed_experts(self) -> int: ...
    @property
    def num_experts_per_tok(self) -> int: ...
    @property
    def n_shared_experts(self) -> int: ...
    @property
    def num_hash_layers(self) -> int: ...
    @property
    def hc_mult(self) -> int: ...
    @property
    def compress_ratios(self) -> Sequence[int]: ...
    @property
    def index_n_heads(self) -> int: ...
    @property
    def index_head_dim(self) -> int: ...
    @property
    def num_nextn_predict_layers(self) -> int: ...


class Storage(enum.Enum):
    """How a weight is stored in the source, and what it becomes in the w8a8 form."""

    PLAIN = "plain"  # no scale; copied byte for byte
    FP8_TO_INT8 = "fp8 to int8"
    FP8_TO_BF16 = "fp8 to bf16"
    EXPERT_TO_INT8 = "expert to int8"  # packed MXFP4, or FP8 in a Base checkpoint

    @property
    def quantized(self) -> bool:
        """Whether the source stores a scale beside the weight."""
        return self is not Storage.PLAIN

    @property
    def int8(self) -> bool:
        """Whether the w8a8 form stores INT8 and a scale a row."""
        return self in (Storage.FP8_TO_INT8, Storage.EXPERT_TO_INT8)


@dataclass(frozen=True)
class WeightSpec:
    """One weight of the model.

    Attributes:
        name: full tensor name (with ``.weight`` where the checkpoint has it).
        shape: logical shape; of a linear weight [out, in].
        storage: see `Storage`.
        dtypes: accepted dtypes of a PLAIN weight, the usual one first; empty for others.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage = Storage.PLAIN
    dtypes: tuple[str, ...] = ()

    @property
    def scale_name(self) -> str:
        """Name of the scale that belongs to a quantized weight."""
        return self.name.removesuffix(".weight") + ".scale"


@dataclass(frozen=True)
class ExpectedTensor:
    """Shape and accepted dtypes of one stored tensor; the first dtype is the one that writers use."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


# Some exports repeat the shared embedding and head inside the MTP block; they carry nothing of their own.
REDUNDANT_MTP_SUFFIXES = ("emb.tok_emb.weight", "head.weight")


def is_drafter(config: ModelDimensions) -> bool:
    """Whether ``mtp.*`` holds the blocks of a DSpark drafter instead of a multi-token-prediction layer."""
    return bool(getattr(config, "dspark_target_layer_ids", None))


def num_mtp_blocks(config: ModelDimensions) -> int:
    """Number of ``mtp.N`` blocks. A drafter has one for each compress ratio beyond the hidden layers."""
    if is_drafter(config):
        return len(config.compress_ratios) - config.num_hidden_layers
    return config.num_nextn_predict_layers


def redundant_tensors(config: ModelDimensions) -> frozenset[str]:
    """Names that may exist beside the expected ones and are ignored."""
    return frozenset(
        f"mtp.{index}.{suffix}" for index in range(num_mtp_blocks(config)) for suffix in REDUNDANT_MTP_SUFFIXES
    )


def weights(config: ModelDimensions) -> Iterator[WeightSpec]:
    """Every weight of the model: globals, hidden layers in order, MTP blocks."""
    yield WeightSpec("embed.weight", (config.vocab_size, config.hidden_size), dtypes=FLOAT_DTYPES)
    yield WeightSpec("head.weight", (config.vocab_size, config.hidden_size), dtypes=FLOAT_DTYPES)
    yield WeightSpec("norm.weight", (config.hidden_size,), dtypes=FLOAT_DTYPES)
    yield from _hyper_connection_head(config, "")
    for layer in range(config.num_hidden_layers):
        yield from block_weights(
            config, f"layers.{layer}.", config.compress_ratios[layer], hashed=layer < config.num_hash_layers
        )
    for index in range(num_mtp_blocks(config)):
        yield from block_weights(config, f"mtp.{index}.", 0, hashed=False)
        yield from _mtp_weights(config, index)


def block_weights(config: ModelDimensions, prefix: str, ratio: int, *, hashed: bool) -> Iterator[WeightSpec]:
    """Weights of one transformer block.

    Args:
        prefix: ``layers.N.`` or ``mtp.N.``.
        ratio: compress ratio of the block's attention: 0 window only, 4 with indexer, 128 without.
        hashed: whether the router looks experts up by token id.
    """
    mix = (2 + config.hc_mult) * config.hc_mult
    for part in ("attn", "ffn"):
        yield WeightSpec(f"{prefix}hc_{part}_fn", (mix, config.hc_mult * config.hidden_size), dtypes=("F32",))
        yield WeightSpec(f"{prefix}hc_{part}_base", (mix,), dtypes=("F32",))
        yield WeightSpec(f"{prefix}hc_{part}_scale", (3,), dtypes=("F32",))
        yield WeightSpec(f"{prefix}{part}_norm.weight", (config.hidden_size,), dtypes=FLOAT_DTYPES)
    yield from _attention_weights(config, f"{prefix}attn.")
    if ratio:
        overlap = 2 if ratio == 4 else 1
        yield from _compressor_weights(config, f"{prefix}attn.compressor.", ratio, overlap, config.head_dim)
    if ratio == 4:
        yield from _indexer_weights(config, f"{prefix}attn.indexer.")
    yield from _moe_weights(config, f"{prefix}ffn.", hashed=hashed)


def _attention_weights(config: ModelDimensions, prefix: str) -> Iterator[WeightSpec]:
    query_width = config.num_attention_heads * config.head_dim
    output_rank = config.o_groups * config.o_lora_rank
    yield WeightSpec(f"{prefix}attn_sink", (config.num_attention_heads,), dtypes=("F32",))
    yield WeightSpec(f"{prefix}wq_a.weight", (config.q_lora_rank, config.hidden_size), Storage.FP8_TO_BF16)
    yield WeightSpec(f"{prefix}q_norm.weight", (config.q_lora_rank,), dtypes=FLOAT_DTYPES)
    yield WeightSpec(f"{prefix}wq_b.weight", (query_width, config.q_lora_rank), Storage.FP8_TO_INT8)
    yield WeightSpec(f"{prefix}wkv.weight", (config.head_dim, config.hidden_size), Storage.FP8_TO_BF16)
    yield WeightSpec(f"{prefix}kv_norm.weight", (config.head_dim,), dtypes=FLOAT_DTYPES)
    yield WeightSpec(f"{prefix}wo_a.weight", (output_rank, query_width // config.o_groups), Storage.FP8_TO_BF16)
    yield WeightSpec(f"{prefix}wo_b.weight", (config.hidden_size, output_rank), Storage.FP8_TO_INT8)


def _compressor_weights(
    config: ModelDimensions, prefix: str, ratio: int, overlap: int, width: int
) -> Iterator[WeightSpec]:
    yield WeightSpec(f"{prefix}ape", (ratio, overlap * width), dtypes=("F32",))
    yield WeightSpec(f"{prefix}wkv.weight", (overlap * width, config.hidden_size), dtypes=FLOAT_DTYPES)
    yield WeightSpec(f"{prefix}wgate.weight", (overlap * width, config.hidden_size), dtypes=FLOAT_DTYPES)
    yield WeightSpec(f"{prefix}norm.weight", (width,), dtypes=FLOAT_DTYPES)


def _indexer_weights(config: ModelDimensions, prefix: str) -> Iterator[WeightSpec]:
    width = config.index_n_heads * config.index_head_dim
    yield WeightSpec(f"{prefix}wq_b.weight", (width, config.q_lora_rank), Storage.FP8_TO_INT8)
    yield WeightSpec(f"{prefix}weights_proj.weight", (config.index_n_heads, config.hidden_size), dtypes=FLOAT_DTYPES)
    yield from _compressor_weights(config, f"{prefix}compressor.", 4, 2, config.index_head_dim)


def _moe_weights(config: ModelDimensions, prefix: str, *, hashed: bool) -> Iterator[WeightSpec]:
    hidden, width = config.hidden_size, config.moe_intermediate_size
    yield WeightSpec(f"{prefix}gate.weight", (config.n_routed_experts, hidden), dtypes=FLOAT_DTYPES)
    if hashed:
        yield WeightSpec(
            f"{prefix}gate.tid2eid", (config.vocab_size, config.num_experts_per_tok), dtypes=INTEGER_DTYPES
        )
    else:
        yield WeightSpec(f"{prefix}gate.bias", (config.n_routed_experts,), dtypes=("F32",))
    shared = config.n_shared_experts * width
    for name, shape in (("w1", (shared, hidden)), ("w2", (hidden, shared)), ("w3", (shared, hidden))):
        yield WeightSpec(f"{prefix}shared_experts.{name}.weight", shape, Storage.FP8_TO_INT8)
    for expert in range(config.n_routed_experts):
        for name, shape in (("w1", (width, hidden)), ("w2", (hidden, width)), ("w3", (width, hidden))):
            yield WeightSpec(f"{prefix}experts.{expert}.{name}.weight", shape, Storage.EXPERT_TO_INT8)


def _hyper_connection_head(config: ModelDimensions, prefix: str) -> Iterator[WeightSpec]:
    yield WeightSpec(f"{prefix}hc_head_fn", (config.hc_mult, config.hc_mult * config.hidden_size), dtypes=("F32",))
    yield WeightSpec(f"{prefix}hc_head_base", (config.hc_mult,), dtypes=("F32",))
    yield WeightSpec(f"{prefix}hc_head_scale", (1,), dtypes=("F32",))


def _mtp_weights(config: ModelDimensions, index: int) -> Iterator[WeightSpec]:
    """What an ``mtp.N`` block has beside the transformer block."""
    prefix, hidden = f"mtp.{index}.", config.hidden_size
    if not is_drafter(config):
        for name in ("enorm", "hnorm", "norm"):
            yield WeightSpec(f"{prefix}{name}.weight", (hidden,), dtypes=FLOAT_DTYPES)
        for name in ("e_proj", "h_proj"):
            yield WeightSpec(f"{prefix}{name}.weight", (hidden, hidden), Storage.FP8_TO_INT8)
        yield from _hyper_connection_head(config, prefix)
        return
    if index == 0:
        targets = len(getattr(config, "dspark_target_layer_ids", ()))
        yield WeightSpec(f"{prefix}main_proj.weight", (hidden, targets * hidden), Storage.FP8_TO_BF16)
        yield WeightSpec(f"{prefix}main_norm.weight", (hidden,), dtypes=FLOAT_DTYPES)
    if index == num_mtp_blocks(config) - 1:
        rank = int(getattr(config, "dspark_markov_rank", 0) or 0)
        yield WeightSpec(f"{prefix}norm.weight", (hidden,), dtypes=FLOAT_DTYPES)
        yield from _hyper_connection_head(config, prefix)
        for name in ("markov_w1", "markov_w2"):
            yield WeightSpec(f"{prefix}markov_head.{name}.weight", (config.vocab_size, rank), dtypes=FLOAT_DTYPES)
        yield WeightSpec(f"{prefix}confidence_head.proj.weight", (1, hidden + rank), dtypes=FLOAT_DTYPES)


def source_tensors(spec: WeightSpec, *, expert_dtype: str) -> dict[str, ExpectedTensor]:
    """Stored tensors of one weight in a source checkpoint.

    Args:
        expert_dtype: ``fp4`` (packed MXFP4) or ``fp8``, the field of config.json.
    """
    if not spec.storage.quantized:
        return {spec.name: ExpectedTensor(spec.shape, spec.dtypes)}
    rows, columns = spec.shape
    if spec.storage is Storage.EXPERT_TO_INT8 and expert_dtype == "fp4":
        return {
            spec.name: ExpectedTensor((rows, columns // 2), ("I8",)),
            spec.scale_name: ExpectedTensor((rows, -(-columns // MXFP4_GROUP)), ("F8_E8M0",)),
        }
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    return {
        spec.name: ExpectedTensor(spec.shape, ("F8_E4M3",)),
        spec.scale_name: ExpectedTensor(blocks, ("F8_E8M0", "F32")),
    }


def w8a8_tensors(spec: WeightSpec) -> dict[str, ExpectedTensor]:
    """Stored tensors of one weight in a w8a8 checkpoint."""
    if not spec.storage.quantized:
        return {spec.name: ExpectedTensor(spec.shape, spec.dtypes)}
    if not spec.storage.int8:
        return {spec.name: ExpectedTensor(spec.shape, ("BF16",))}
    return {
        spec.name: ExpectedTensor(spec.shape, ("I8",)),
        spec.scale_name: ExpectedTensor(spec.shape[:1], ("F32",)),
    }


def expected_tensors(config: ModelDimensions, kind: CheckpointKind) -> dict[str, ExpectedTensor]:
    """Every tensor that a complete checkpoint of this configuration stores."""
    expert_dtype = str(getattr(config, "expert_dtype", None) or "fp4")
    result: dict[str, ExpectedTensor] = {}
    for spec in weights(config):
        result.update(source_tensors(spec, expert_dtype=expert_dtype) if kind == "source" else w8a8_tensors(spec))
    return result
